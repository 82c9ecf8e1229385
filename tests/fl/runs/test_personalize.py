"""New clients: what they begin with, how they fine-tune it, and on what they are tested."""

import pytest
import torch
import torch.nn.functional as F
from refusals import fl_refused
from selection import METHODS, some
from torch import nn

import fl
from fl.algorithms import ALGORITHMS
from fl.runs import checkpoint

LORA = ("flora", "flora_na", "flexlora", "hetlora", "fedsa_lora")


def config(algorithm="fedavg", **more):
    few = {"samples": 160, "clients": 4, "participants": 2, "rounds": 1, "local_epochs": 1, "partition": "iid"}
    kind = ALGORITHMS[algorithm].clients
    few |= {"model": "resnet20" if kind == "heterogeneous" else "cnn", "width": 0.1, "lr": 0.05, "momentum": 0.0}
    few |= {"batch_size": 50}
    if algorithm in LORA:
        few["adapters"] = fl.AdapterOptions("lora", rank=2)
    if algorithm == "fedbn":
        few["norm"] = "batch"
    if algorithm == "femam":
        few |= {"rounds": 2, "femam": {"levels": ("global", "2"), "level_rounds": (1,)}}
    if algorithm in ("depthfl", "scalefl"):
        few["exits"] = True
    return fl.Config.of(algorithm=algorithm, **few | more)


@pytest.fixture(scope="module")
def digits():
    return fl.Config().load()


@pytest.fixture(scope="module")
def new(digits):
    """Three new clients, who test on some of their own samples."""
    owners = ["lima"] * 10 + ["oslo"] * 20 + ["bern"] * 30
    return fl.Dataset.from_arrays(digits.x[-60:], digits.y[-60:], digits.test_x, digits.test_y, owners)


@pytest.fixture(scope="module")
def tested(digits):
    """Two new clients with test samples that are theirs."""
    x, y, owners = digits.x[-50:], digits.y[-50:], [7] * 20 + [3] * 30
    return fl.Dataset.from_arrays(x, y, digits.test_x[:9], digits.test_y[:9], owners, test_owners=[3] * 4 + [7] * 5)


@pytest.fixture(scope="module")
def fedavg(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "fedavg"
    fl.simulate(config(), folder)
    return folder


def accuracy(net, data, rows):
    x, y = data.normalise(data.test_x[rows]), data.test_y[rows]
    with torch.no_grad():
        return (net(x).argmax(1) == y).float().mean().item()


def test_personalize__clients_test_on_their_own_test_samples_before_and_after(fedavg, tested):
    found = fl.personalize(fedavg, tested, epochs=2)
    assert [(row["client"], row["samples"], row["tested"]) for row in found.rows] == [("3", 30, 4), ("7", 20, 5)]
    for k, rows in enumerate((slice(0, 4), slice(4, 9))):
        row = found.rows[k]
        assert row["accuracy_before"] == pytest.approx(accuracy(fl.load_model(fedavg), tested, rows))
        assert row["accuracy_after"] == pytest.approx(accuracy(found.model(k), tested, rows))
        assert row["loss_before"] != row["loss_after"]
    assert "accuracy before" in str(found)


def test_personalize__one_step_of_fine_tuning_is_plain_gradient_descent(fedavg, tested):
    """All samples of the client with most of them are one batch."""
    found = fl.personalize(fedavg, tested, epochs=1)
    net = fl.load_model(fedavg).train()
    own = tested.owners == 3
    F.cross_entropy(net(tested.normalise(tested.x[own])), tested.y[own]).backward()
    trained = dict(found.model(0).named_parameters())
    for name, p in net.named_parameters():
        torch.testing.assert_close(trained[name], p - 0.05 * p.grad, atol=1e-5, rtol=1e-4)


def test_personalize__without_epochs_nothing_changes(fedavg, new):
    for row in fl.personalize(fedavg, new, epochs=0).rows:
        assert row["accuracy_after"] == row["accuracy_before"]


def test_personalize__clients_hold_out_a_share_if_no_test_samples_are_theirs(fedavg, new):
    found = fl.personalize(fedavg, new, epochs=0, held_out=0.5)
    assert [(r["client"], r["samples"], r["tested"]) for r in found.rows] == [
        ("bern", 15, 15), ("lima", 5, 5), ("oslo", 10, 10),
    ]  # fmt: skip


def test_personalize__numbers_of_samples_are_rows(fedavg, new):
    found = fl.personalize(fedavg, new, epochs=3, samples=[12, 4])
    assert [(r["client"], r["samples"]) for r in found.rows] == [
        ("bern", 4), ("bern", 12), ("lima", 4), ("oslo", 4), ("oslo", 12),
    ]  # fmt: skip
    assert found.rows[0]["loss_before"] == found.rows[1]["loss_before"]
    assert found.rows[0]["loss_after"] != found.rows[1]["loss_after"]


def test_personalize__it_repeats_itself_and_leaves_the_folder_alone(fedavg, new):
    before = {path.name: path.read_bytes() for path in fedavg.iterdir()}
    one, other = fl.personalize(fedavg, new).rows, fl.personalize(fedavg, new).rows
    assert one == other
    assert {path.name: path.read_bytes() for path in fedavg.iterdir()} == before


@pytest.mark.parametrize("algorithm", some(ALGORITHMS, METHODS[::3]))
def test_personalize__every_method_serves_new_clients(algorithm, new, tmp_path):
    try:
        fl.simulate(config(algorithm), tmp_path / "run")
    except fl.FLError as refused:
        pytest.skip(str(refused))
    found = fl.personalize(tmp_path / "run", new, epochs=1)
    assert [row["client"] for row in found.rows] == ["bern", "lima", "oslo"]
    for row in found.rows:
        assert 0 <= row["accuracy_before"] <= 1
        assert row["loss_before"] != row["loss_after"]


@pytest.mark.parametrize(
    ("algorithm", "fresh"),
    [("ditto", ""), ("fedrep", "head"), *(pytest.param(n, "", marks=pytest.mark.slow) for n in ("pfedme", "fesem"))]
    + [pytest.param(name, "all", marks=pytest.mark.slow) for name in ("local", "fedproto")],
)
def test_personalize__a_new_client_begins_with_what_the_method_sends(algorithm, fresh, new, tmp_path):
    settings = config(algorithm)
    fl.simulate(settings, tmp_path / "run")
    begun = fl.personalize(tmp_path / "run", new, epochs=0).model(1).state_dict()
    initial = fl.build(settings)[0].initial()
    _, parts = checkpoint.read_parts(tmp_path / "run")
    heads = [*initial][-2:]
    for name, tensor in begun.items():
        is_fresh = fresh == "all" or (fresh == "head" and name in heads)
        assert torch.equal(tensor, (initial if is_fresh else parts["global"])[name]), name


@pytest.mark.slow
def test_personalize__in_femam_new_clients_join_levels(new, tmp_path):
    fl.simulate(config("femam"), tmp_path / "run")
    found = fl.personalize(tmp_path / "run", new, epochs=1, held_out=0.5)
    pathways, fed = fl.Pathways.load(tmp_path / "run"), found._fed
    x, y = fed.data.gather(fed.clients[0].train)
    client = pathways.join(fed.data.normalise(x), y)
    x, y = fed.data.gather(fed.clients[0].test)
    loss = F.cross_entropy(pathways.predict(client, fed.data.normalise(x)), y)
    assert found.rows[0]["loss_before"] == pytest.approx(loss.item(), rel=1e-5)
    with torch.no_grad():
        loss = F.cross_entropy(found.model(0)(fed.data.normalise(x)), y)
    assert found.rows[0]["loss_after"] == pytest.approx(loss.item(), rel=1e-5) != found.rows[0]["loss_before"]


def test_personalize__a_model_of_ones_own_on_a_table(tmp_path):
    x, y = torch.randn(80, 3), torch.arange(80) % 3
    data = fl.Dataset.from_arrays(x, y, x, y)
    few = fl.Dataset.from_arrays(x[:8], y[:8] % 2, x, y % 2, [0, 1] * 4)  # two of the three classes
    net = nn.Linear(3, 3)
    settings = fl.Config.of(algorithm="fedavg", rounds=1, clients=2, partition="iid")
    run = fl.Run(settings, tmp_path / "run", dataset=data, model=net)
    for _ in run:
        pass
    assert len(fl.personalize(run, few).rows) == 2
    with fl_refused("argument", "model="):
        fl.personalize(tmp_path / "run", few)
    wide = fl.Dataset.from_arrays(torch.randn(8, 4), y[:8], x.repeat(1, 2)[:, :4], y, [0, 1] * 4)
    with fl_refused("mismatch", "' samples are of shape [4], and the run'"):
        fl.personalize(run, wide)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_personalize__other_tasks_have_their_own_scores(task, tmp_path):
    x = torch.randn(80, 3)
    y = x[:, :2] if task == "regression" else (x[:, :2] > 0).float()
    data = fl.Dataset.from_arrays(x, y, x, y, torch.arange(80) % 4, task=task)
    settings = fl.Config.of(algorithm="fedavg", rounds=1, clients=2, partition="iid")
    fl.simulate(settings, tmp_path / "run", dataset=data, model=nn.Linear(3, 2))
    found = fl.personalize(tmp_path / "run", data, model=nn.Linear(3, 2))
    first = "mae" if task == "regression" else "accuracy"
    assert all({f"{first}_before", f"{first}_after"} <= row.keys() for row in found.rows)
    assert f"{first} before" in str(found)


def test_personalize__what_is_refused(fedavg, digits, new, tested, tmp_path):
    same = {"x": new.x, "y": new.y, "test_x": new.test_x, "test_y": new.test_y}
    alone = fl.Dataset.from_arrays(**same, owners=[0] * 59 + [1])
    held = fl.Dataset.from_arrays(**same, owners=[0] * 60, valid=[True] * 20 + [False] * 40)
    strange = fl.Dataset.from_arrays(**same, owners=[0] * 60, test_owners=[1] * len(new.test_y))
    many = fl.Dataset.from_arrays(**same, owners=[0] * 60, classes=12)
    small = fl.Dataset.from_arrays(
        **{name: values[..., :6, :6] if "x" in name else values for name, values in same.items()}, owners=[0] * 60
    )
    for data, more, word in (
        (digits, {}, "owners"),
        (new.x, {}, "Dataset"),
        (alone, {}, "owner 1"),
        (held, {}, "valid"),
        (strange, {}, "test_owners"),
        (many, {}, "12 classes"),
        (small, {}, "image_size"),
        (new, {"epochs": -1}, "epochs"),
        (new, {"samples": [0]}, "samples"),
        (new, {"samples": [1000]}, "largest"),
        (new, {"held_out": 1.0}, "held_out"),
    ):
        with pytest.raises(fl.FLError, match=word):
            fl.personalize(fedavg, data, **more)
    with pytest.raises(fl.FLError):
        fl.personalize(tmp_path / "nothing", new)
