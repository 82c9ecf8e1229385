"""Losses, metrics and tasks: classes, numbers to predict, several labels a sample."""

import copy
import csv
import math
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from ranks import NEED_ADAPTERS, NEED_EXITS
from refusals import fl_refused
from selection import METHODS, some
from sklearn import metrics as sk
from sklearn.linear_model import LinearRegression
from torch import nn

import fl
from fl.algorithms import ALGORITHMS
from fl.algorithms.femam import FeMAMOptions
from fl.engine import losses
from fl.federation.client_models import share_model
from fl.federation.scores import macro_f1, metric, r2
from fl.runs import evaluate
from fl.runs.metrics import best, read
from surgery.adapters import products

LOGITS, LABELS = torch.randn(40, 3, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
SEVERAL = (torch.rand(40, 3, generator=torch.Generator().manual_seed(1)) > 0.4).float()
NUMBERS = torch.randn(40, 3, generator=torch.Generator().manual_seed(2))


def nothing(outputs, targets):
    """A loss of 0, so that nobody learns."""
    return 0 * outputs.flatten(1).sum(1)


def half_squared(outputs, targets):
    return (F.cross_entropy(outputs, targets, reduction="none") ** 2) / 2


def hardest(outputs, targets):
    """A loss that counts the three hardest samples of a batch alone."""
    losses = F.cross_entropy(outputs, targets, reduction="none")
    return losses * (losses >= losses.topk(3).values[-1])


def one_number(outputs, targets):
    return F.cross_entropy(outputs, targets)


def margin(outputs, targets):
    """A metric: mean difference between the right logit and the largest."""
    return (outputs[np.arange(len(targets)), targets] - outputs.max(1)).mean()


def share(outputs, targets):
    """A metric that works in place, as many write a softmax: the mean share of the right class."""
    outputs -= outputs.max(1, keepdims=True)
    np.exp(outputs, out=outputs)
    outputs /= outputs.sum(1, keepdims=True)
    return outputs[np.arange(len(targets)), targets].mean()


def fails(outputs, targets):
    raise KeyError("zzz")


def fails_later(outputs, targets):
    return {24: 0.5}[len(targets)]  # eight samples of three classes, as it is tried on


def a_word(outputs, targets):
    return "0.5"


def a_row(outputs, targets):
    return outputs.max(1)


def wrong(outputs, targets):
    """No loss: a count, without a gradient."""
    return outputs.argmax(1) != targets


def wrong_share(outputs, targets):
    return wrong(outputs, targets).float()


def table(task, n=480, features=6, outputs=3):
    """A table whose targets are linear in it."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, features, generator=generator)
    scores = x @ torch.randn(features, outputs, generator=generator)
    y = {"classification": scores.argmax(1), "regression": scores / 3, "multilabel": (scores > 0).int()}[task]
    cut = 3 * n // 4
    return fl.Dataset.from_arrays(x[:cut], y[:cut], x[cut:], y[cut:], task=task)


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def settings(**more):
    few = {"algorithm": "fedavg", "clients": 6, "participants": 2, "rounds": 2, "partition": "iid", "local_epochs": 1}
    return fl.Config.of(**{**few, **more})


WEIGHTS = torch.tensor([1.0, 2.0, 0.5])


def focal(logits, labels):
    shares = logits.softmax(1)
    return torch.stack([-WEIGHTS[y] * (1 - p[y]) ** 2 * p[y].log() for p, y in zip(shares, labels)])


def bce(logits, labels):
    shares = logits.sigmoid()
    return -(WEIGHTS * labels * shares.log() + (1 - labels) * (1 - shares).log()).mean(1)


def smoothed(logits, labels):
    target = 0.1 / 3 + 0.9 * F.one_hot(labels, 3)
    return -(WEIGHTS * target * logits.log_softmax(1)).sum(1)


@pytest.mark.parametrize(
    ("name", "options", "targets", "expected"),
    [
        ("default", {"smoothing": 0.1, "weights": WEIGHTS.tolist()}, LABELS, smoothed),
        ("focal", {"weights": WEIGHTS.tolist()}, LABELS, focal),
        ("default", {}, NUMBERS, lambda out, y: ((out - y) ** 2).mean(1)),
        ("mae", {}, NUMBERS, lambda out, y: (out - y).abs().mean(1)),
        ("huber", {}, NUMBERS, lambda out, y: F.huber_loss(out, y, reduction="none").mean(1)),
        ("default", {"weights": WEIGHTS.tolist()}, SEVERAL, bce),
    ],
)
def test_tasks__losses_by_name(name, options, targets, expected):
    task = "classification" if targets is LABELS else "regression" if targets is NUMBERS else "multilabel"
    loss = losses.by_name(name, task, outputs=3, **options)
    torch.testing.assert_close(loss(LOGITS, targets), expected(LOGITS, targets))


@pytest.mark.parametrize(
    ("task", "targets"), [("classification", LABELS), ("regression", NUMBERS), ("multilabel", SEVERAL)]
)
def test_tasks__the_loss_of_a_model_with_exits_is_the_sum_of_theirs(task, targets):
    exits = torch.stack([LOGITS, LOGITS.flip(0), LOGITS / 2], 1)
    names = [name for name, its in losses.NAMES.items() if its == task]
    for loss in [losses.by_name(name, task, outputs=3) for name in names]:
        expected = sum(loss(exits[:, e], targets) for e in range(3))
        torch.testing.assert_close(losses.per_sample(loss, exits, targets), expected)
        torch.testing.assert_close(losses.mean(loss, exits, targets), expected.mean())
        assert torch.equal(losses.per_sample(loss, LOGITS, targets), loss(LOGITS, targets))


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_tasks__clients_train_every_exit_of_their_model(backend):
    """One step of one client, written out; and predictions are the mean of the exits."""
    config = fl.Config.of(
        algorithm="fedavg", samples=60, clients=2, participants=1, model="resnet20", depth=(1,), width=(0.25,),
        norm="group", exits=True, local_epochs=1, batch_size=100, min_samples=2, momentum=0.0, lr=0.1, backend=backend,
    )  # fmt: skip
    fed, algorithm = fl.build(config)
    server, rng = algorithm.init(), fl.Rng(0, 1)
    (client,) = algorithm.choose(server, rng)
    samples = fed.clients.train[client]
    x, y = fed.data.normalise(fed.data.samples_at(samples)), fed.data.labels_at(samples)
    net = copy.deepcopy(fed.model).train()
    net.load_state_dict(server["global"])
    logits = net(x)
    assert logits.shape == (len(y), 3, 10)
    loss = sum(nn.functional.cross_entropy(logits[:, e], y) for e in range(3))
    loss.backward()
    after, update = algorithm.round(server, [client], rng)
    torch.testing.assert_close(update.loss[0].item(), loss.item(), atol=1e-5, rtol=1e-6)
    for name, p in net.named_parameters():
        torch.testing.assert_close(after["global"][name], p.detach() - 0.1 * p.grad, atol=1e-5, rtol=1e-4, msg=name)
    logits = net(fed.data.normalise(fed.data.test_x[:5]))
    net.load_state_dict(server["global"])
    torch.testing.assert_close(algorithm.predict(server, fed.data.test_x[:5], None), logits.detach().mean(1))


WITH_ANY_LOSS = [name for name, one in ALGORITHMS.items() if "any_loss" not in one.lacks]
KINDS = {*METHODS, "apfl", "depthfl", "ditto", "fedasam", "fedprox", "fjord", "moon", "nefl", "perfedavg", "scaffold"}


@pytest.mark.parametrize("method", some(WITH_ANY_LOSS, [name for name in WITH_ANY_LOSS if name in KINDS]))
def test_tasks__every_method_minimises_the_loss_that_it_is_given(method, tmp_path):
    """A loss of 0 moves no model, except for what a method's own terms do."""
    validating = {"local_valid": 0.2} if ALGORITHMS[method].validates(ALGORITHMS[method].options) else {}
    config = settings(algorithm=method, loss=nothing, clients=14, **validating)
    if method in NEED_ADAPTERS:
        config = config.replace(adapters=NEED_ADAPTERS[method])
    if ALGORITHMS[method].clients == "heterogeneous":  # which need a model of the zoo
        if method in NEED_EXITS:  # whose exits are not apart with one section
            one = fl.ArchitectureOptions(depths=("1-0-0-0",))
            config = config.replace(model="resnet9", width=(0.1,), exits=True, architectures=one)
        fed, algorithm = fl.build(config)
    else:
        normed = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
        fed, algorithm = fl.build(config, table("classification"), lambda: copy.deepcopy(normed))
    server = algorithm.init()
    rng = fl.Rng(0, 1)
    after, update = algorithm.round(server, algorithm.choose(server, rng), rng)
    if method == "pfedme":  # pulls its models towards 0
        return
    term = math.log(2) if method == "moon" else 0.0  # of a client whose last model is the received one
    torch.testing.assert_close(update.loss, torch.full_like(update.loss, term))
    if method in ("flexlora", "flora", "hetlora"):  # factors the products anew, begins anew, or fills up with zeros
        assert not any(product.any() for product in products(after["global"]).values())
        return
    for name, tensor in fed.initial().items():
        if name in fed.trainable:
            torch.testing.assert_close(after["global"][name], tensor, atol=1e-6, rtol=1e-5, msg=f"{method}: {name}")


@pytest.mark.parametrize("backend", ["vmap", "workers"])
def test_tasks__backends_agree_on_a_loss_of_your_own(backend):
    rounds = {}
    for name in ("loop", backend):
        _, algorithm = fl.build(settings(loss=half_squared, backend=name), table("classification"), net)
        rounds[name] = algorithm.round(algorithm.init(), [0, 1], fl.Rng(0, 1))[0]["global"]
    for name, tensor in rounds["loop"].items():
        torch.testing.assert_close(rounds[backend][name], tensor)


def test_tasks__class_weights_of_1_and_no_smoothing_are_cross_entropy():
    states = []
    for weights in ((), (1.0, 1.0, 1.0)):
        _, algorithm = fl.build(settings(class_weights=weights), table("classification"), net)
        states.append(algorithm.round(algorithm.init(), [0, 1], fl.Rng(0, 1))[0]["global"])
    torch.testing.assert_close(*states)


@pytest.mark.slow
def test_simulate__regression_reaches_least_squares(tmp_path):
    data = table("regression")
    config = settings(clients=1, participants=1, rounds=30, local_epochs=4, lr=0.1, momentum=0.5)
    summary = fl.simulate(config, tmp_path / "run", dataset=data, model=lambda: nn.Linear(6, 3))
    exact = LinearRegression().fit(data.x, data.y).predict(data.test_x)
    assert summary["final"]["mae"] == pytest.approx(sk.mean_absolute_error(data.test_y, exact), abs=2e-3)
    assert summary["final"]["r2"] > 0.999
    assert summary["best"].keys() == {"round", "mae"}
    assert summary["best"]["mae"] == min(row["mae"] for row in read(tmp_path / "run" / "metrics.csv"))
    assert "accuracy" not in summary["final"]


@pytest.mark.parametrize("task", ["regression", "multilabel"])
def test_tasks__scores_of_each_client_are_scikit_learn_s(task):
    fed, algorithm = fl.build(settings(local_test=0.3), table(task), net)
    server = algorithm.round(algorithm.init(), [0, 1], fl.Rng(0, 1))[0]
    rows = evaluate.score_clients(fed, lambda: share_model(server["global"], 6))["test"]
    for row, part in zip(rows, fed.clients.test):
        out, y = fed.predict(server["global"], fed.data.x[part]).numpy(), fed.data.y[part].numpy()
        if task == "regression":
            expected = {
                "mae": sk.mean_absolute_error(y, out),
                "loss": sk.mean_squared_error(y, out),
                "r2": sk.r2_score(y, out),
            }
        else:
            expected = {
                "accuracy": sk.accuracy_score(y, out > 0),
                "loss": F.binary_cross_entropy_with_logits(torch.tensor(out), torch.tensor(y)).item(),
                "f1": sk.f1_score(y, out > 0, average="macro", zero_division=np.nan),
            }
        assert list(row) == list(expected)
        assert row == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3))
def test_r2__and_macro_f1_of_several_labels_are_scikit_learn_s(seed, outputs, clients):
    rng = np.random.default_rng(seed)
    owners = np.sort(np.concatenate([np.arange(clients), rng.integers(clients, size=9)]))
    targets, predicted = rng.integers(3, size=(2, len(owners), outputs)).astype(float)
    several, said = (targets > 1).astype(int), (predicted > 1).astype(int)
    found, labels = r2(predicted, targets, owners), macro_f1(said, several, owners)
    for owner in range(clients):
        rows = owners == owner
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            differs = (targets[rows] != targets[rows][0]).any(0)
            expected = sk.r2_score(targets[rows][:, differs], predicted[rows][:, differs]) if differs.any() else np.nan
            if outputs > 1:
                f1 = sk.f1_score(several[rows], said[rows], average="macro", zero_division=np.nan)
                assert labels[owner] == pytest.approx(f1, nan_ok=True)
        assert found[owner] == pytest.approx(expected, nan_ok=True)


def test_simulate__a_client_without_a_class_does_not_count_in_its_mean(tmp_path):
    """Its recall once counted as 0, and so did F1 and precision of classes that it neither has nor predicts."""
    outputs, y = np.eye(4)[[0, 0, 1]], np.array([0, 1, 1])
    known = {"recall": [1, 1 / 2], "precision": [1 / 2, 1], "f1": [2 / 3, 2 / 3]}  # of predictions 0, 0, 1
    for what, values in known.items():
        found = metric(f"{what}_per_class", table("classification", outputs=4))(outputs, y)
        assert list(found.values()) == pytest.approx([*values, np.nan, np.nan], nan_ok=True)
    config = settings(metrics=["recall_per_class"], local_test=0.3, partition="shards", class_share=0.34, rounds=1)
    data = table("classification")
    summary = fl.simulate(config, tmp_path / "run", dataset=data, model=net)
    fed, _ = fl.build(config, data, net)
    with open(tmp_path / "run" / "clients.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["round"] == "1"]
    for k in range(3):
        has = [bool((fed.data.y[split.test] == k).any()) for split in fed.clients]
        assert not all(has)
        scores = [float(row[f"test_recall_{k}"] or "nan") for row in rows]
        assert [not np.isnan(score) for score in scores] == has
        assert summary["final"][f"local_test_recall_{k}"] == pytest.approx(np.nanmean(scores))


def test_simulate__metrics_are_scikit_learn_s_and_your_own(tmp_path):
    names = ["roc_auc_ovr", "balanced_accuracy", "recall_per_class", margin]
    config = settings(metrics=names, local_test=0.3, best_by="test_roc_auc_ovr", rounds=3, keep_best=True)
    data = table("classification")
    summary = fl.simulate(config, tmp_path / "run", dataset=data, model=net)
    model = fl.load_model(tmp_path / "run", model=net)
    out, y = model.eval()(data.test_x).detach(), data.test_y
    recalls = sk.recall_score(y, out.argmax(1), average=None)
    expected = {
        "test_roc_auc_ovr": sk.roc_auc_score(y, out.double().softmax(1), multi_class="ovr"),
        "test_balanced_accuracy": sk.balanced_accuracy_score(y, out.argmax(1)),
        **{f"test_recall_{k}": recall for k, recall in enumerate(recalls)},
        "test_margin": margin(out.numpy(), y.numpy()),
    }
    assert {name: summary["final"][name] for name in expected} == pytest.approx(expected, rel=1e-5)
    rows = read(tmp_path / "run" / "metrics.csv")
    assert best(rows, "test_roc_auc_ovr")["test_roc_auc_ovr"] == max(row["test_roc_auc_ovr"] for row in rows)
    with open(tmp_path / "run" / "clients.csv") as file:
        scores = [float(row["test_margin"]) for row in csv.DictReader(file) if row["round"] == "3"]
    assert summary["final"]["local_test_margin"] == pytest.approx(np.mean(scores))
    assert fl.Config.read(tmp_path / "run").evaluation.metrics[-1].endswith("test_tasks:margin")


def test_simulate__a_metric_that_writes_into_what_it_gets_changes_no_other(tmp_path):
    config = settings(rounds=1, metrics=[share, "neg_log_loss"], local_test=0.2)
    final = fl.simulate(config, tmp_path / "run", dataset=table("classification"), model=net)["final"]
    assert final["test_neg_log_loss"] == pytest.approx(-final["loss"], rel=1e-6)
    assert final["local_test_neg_log_loss"] == pytest.approx(-final["local_test_loss"], rel=1e-6)


def test_tasks__a_metric_that_is_not_defined_is_left_out_of_clients_means():
    rows = [{"accuracy": 1.0, "loss": 0.0, "f1": 1.0, "roc_auc": value} for value in (0.5, float("nan"), 1.0)]
    assert evaluate.summarise_clients({"test": rows})["local_test_roc_auc"] == 0.75
    one_class = metric("roc_auc_ovr", table("classification"))(LOGITS.numpy(), np.zeros(40, int))
    assert np.isnan(one_class["roc_auc_ovr"])


@pytest.mark.parametrize(("clients", "tenth"), [(20, 0.5), (19, 0.0), (3, 0.0)])
def test_tasks__the_worst_tenth_of_clients_is_rounded_down_and_at_least_one(clients, tenth):
    rows = [{"accuracy": k / 20, "loss": 0.0, "f1": 0.0} for k in range(clients)]
    assert evaluate.summarise_clients({"test": rows})["local_test_worst_tenth"] == pytest.approx(tenth / 20)
    errors = [{"mae": float(k), "loss": 0.0, "r2": 0.0} for k in range(clients)]
    assert evaluate.summarise_clients({"test": errors})["local_test_mae_worst_tenth"] == clients - 1 - tenth


def test_tasks__classes_by_name():
    x = torch.rand(4, 2)
    data = fl.Dataset.from_arrays(x, ["dog", "cat", "dog", "cow"], x, np.array(["cow", "cow", "cat", "dog"]))
    assert data.names == ("cat", "cow", "dog")
    assert data.y.tolist() == [2, 0, 2, 1]
    assert data.test_y.tolist() == [1, 1, 0, 2]
    other = fl.Dataset.from_arrays(x, ["a", "b", "a", "b"], x, ["a", "b", "a", "b"], names=["b", "a"])
    assert other.y.tolist() == [1, 0, 1, 0]
    assert metric("f1_per_class", data).names == ("f1_cat", "f1_cow", "f1_dog")
    assert fl.Dataset.from_arrays(x, np.array(["b", "a"] * 2, "S"), x, np.array(["a", "b"] * 2, "S")).names == (
        "a",
        "b",
    )
    with fl_refused("data", "test_y", "'ant'"):
        fl.Dataset.from_arrays(x, ["a", "b", "a", "b"], x, ["a", "b", "ant", "b"])


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        ("classification", {"loss": "mse"}, "--loss"),
        ("regression", {"loss": "cross_entropy"}, "choose mse, mae, huber"),
        ("regression", {"class_weights": (1, 1, 1)}, "--class-weights"),
        ("regression", {"label_smoothing": 0.1}, "--label-smoothing.*cross_entropy"),
        ("classification", {"class_weights": (0, 0, 0)}, "--class-weights"),
        ("classification", {"class_weights": (1, 2)}, "gives 2 weights, and the model has 3 outputs"),
        ("classification", {"loss": "hinge"}, "--loss.*cross_entropy"),
        ("classification", {"loss": "nowhere:f"}, "--loss"),
        ("classification", {"loss": one_number}, r"returns \[\] for 10 samples: let it return the loss of each"),
        ("classification", {"loss": wrong}, "wrong is torch.bool, so that nothing can be trained with it"),
        ("classification", {"loss": wrong_share}, "wrong_share"),
        ("classification", {"metrics": [fails]}, "24.*KeyError.*'zzz'"),
        ("classification", {"metrics": [fails_later]}, r"fails_later fails for \d+ samples: KeyError: "),
        ("classification", {"metrics": [a_word]}, "a_word.*24"),
        ("classification", {"metrics": [a_row]}, "a_row.*24"),
        ("regression", {"partition": "dirichlet"}, "depends on class labels, and these are no classes: choose"),
        ("regression", {"masked_loss": True}, "--masked-loss"),
        ("multilabel", {"eval_client_models_every": 1}, "--eval-client-models-every"),
        ("regression", {"metrics": ["roc_auc"]}, "--metrics.*roc_auc"),
        ("classification", {"metrics": ["roc_auc"]}, "cannot be measured for classification with 3 outputs"),
        ("classification", {"metrics": ["r2"]}, "it is for regression"),
        ("classification", {"metrics": ["auc"]}, "--metrics.*'auc'.*precision_per_class"),
        ("regression", {"metrics": ["f1_per_class"]}, "there are no classes"),
        ("regression", {"best_by": "accuracy"}, "--best-by"),
        ("regression", {"algorithm": "femam", "local_valid": 0.2}, "--femam.level-r"),
        ("regression", {"algorithm": "fedgen"}, "fedgen learns from the cross entropy of classes"),
    ],
)
def test_simulate__refusals(task, more, message, tmp_path):
    with pytest.raises(fl.FLError, match=message):
        fl.simulate(settings(**more), tmp_path / "run", dataset=table(task), model=net)


def test_tasks__a_loss_may_need_more_than_two_samples(tmp_path):
    fl.simulate(settings(loss=hardest), tmp_path / "run", dataset=table("classification"), model=net)


def test_tasks__functions_without_a_name_are_refused():
    with fl_refused("argument", "--loss"):
        settings(loss=lambda outputs, targets: outputs.sum(1))


@pytest.mark.parametrize(
    ("task", "y", "message"),
    [
        ("multilabel", [0, 1, 2], "several labels are"),
        ("multilabel", [[0, 2], [1, 0], [0, 0]], "other values than 0 and 1"),
        ("regression", [0.0, float("nan"), 1.0], "not finite"),
        ("regression", [0.0, 1.0], "there are 3 samples"),
        ("ranking", [0.0, 1.0, 2.0], "'ranking'"),
    ],
)
def test_tasks__targets_that_are_none(task, y, message):
    x = torch.rand(3, 2)
    with pytest.raises(fl.FLError, match=message):
        fl.Dataset.from_arrays(x, y, x, y, task=task)


@pytest.mark.slow
def test_simulate__regression_with_femam_and_figures(tmp_path, capsys):
    """Levels add up for numbers as for logits; compare prints errors and draws them."""
    from fl.compare import main

    for method, held in (("femam", {"local_valid": 0.2}), ("fedavg", {})):
        options = {"femam": FeMAMOptions(levels=("global", "personal"), level_rounds=(1,))} if held else {}
        config = settings(algorithm=method, local_test=0.2, rounds=3, **held, **options)
        fl.simulate(config, tmp_path / method, dataset=table("regression"), model=net)
    assert main([str(tmp_path / "femam"), str(tmp_path / "fedavg"), "--out", str(tmp_path / "all.png")]) == 0
    printed = capsys.readouterr().out
    assert "clients' abs. error" in printed
    assert "R2" in printed
    assert (tmp_path / "all.png").exists()


def test_tasks__labels_that_are_0_and_1_are_no_classes():
    """HeteroFL's clients train all outputs of several labels, and of numbers."""
    for task in ("multilabel", "regression"):
        fed, _ = fl.build(settings(), table(task), net)
        assert fed.true_classes([0, 1]).all()


@pytest.mark.parametrize("method", ["heterofl", "fedrolex", "fedfa"])
@pytest.mark.parametrize("task", ["multilabel", "regression"])
def test_tasks__clients_of_unequal_width_train_every_output(task, method):
    _, algorithm = fl.build(settings(algorithm=method), table(task), net)
    server = algorithm.init()
    after, _ = algorithm.round(server, [0, 1], fl.Rng(0, 1))
    assert (after["global"]["2.weight"] - server["global"]["2.weight"]).abs().amax(1).min() > 1e-4


def accuracy(outputs, targets):
    return 0.0


def needs_both(outputs, targets):
    if len(np.unique(targets)) < 4:
        raise ValueError("some class is missing")
    return 1.0


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ([accuracy], "accuracy is measured in every run; leave it out, or rename your own"),
        (["accuracy"], "accuracy is measured in every run"),
        ([margin, margin], "there is another margin; leave one out, or rename it"),
    ],
)
def test_tasks__metrics_of_one_name_are_refused(metrics, message):
    with fl_refused("name", message):
        fl.build(settings(metrics=metrics), table("classification"), net)


def test_simulate__a_metric_of_your_own_may_be_undefined(tmp_path):
    fl.simulate(settings(metrics=[needs_both], rounds=1), tmp_path / "run", dataset=table("classification"), model=net)
    assert np.isnan(read(tmp_path / "run" / "metrics.csv")[0]["test_needs_both"])


def test_tasks__the_landscape_of_numbers_and_who_holds_how_many(tmp_path, capsys, monkeypatch):
    from fl.analysis.landscape import mean_loss
    from fl.data.__main__ import main

    data = table("regression")
    model = net().eval()
    loss = losses.by_name("huber", "regression")
    found = mean_loss(model, data, data.test_x, data.test_y, 1, loss)(dict(model.named_parameters()))
    assert found.item() == pytest.approx(loss(model(data.test_x), data.test_y).mean().item(), rel=1e-5)
    monkeypatch.setattr(fl.Config, "load", lambda self: data)
    assert main(["--clients", "4", "--partition", "iid"]) == 0
    assert "classes a client" not in capsys.readouterr().out
