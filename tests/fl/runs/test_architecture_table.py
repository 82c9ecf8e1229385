import copy
import csv
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from ranks import NEED_ADAPTERS, NEED_EXITS
from rounds import made
from selection import some
from wrapped import wrapped

import surgery
import zoo
from fl import simulate
from fl.algorithms import OPTIONS, methods_of
from fl.base.rng import Rng
from fl.data import Dataset
from fl.extensions.attack import Attack
from fl.figures.coverage import leave_coverage
from fl.models.architectures import ArchitectureOptions
from fl.models.fleet import make_fleet
from fl.runs import evaluate
from fl.runs.assembly import build
from fl.runs.folder import ARCHITECTURES as FILE
from fl.runs.folder import architecture_rows, save_architectures
from fl.runs.metrics import read
from fl.runs.state import RunState
from fl.settings import Config
from zoo import Spec

WIDE = Spec("preresnet20", 3, 1, 8, width=0.125, depth=(2, 1, 1))
NARROW = WIDE.scale(0.5)
SHALLOW = WIDE.scale(depth=1)
KINDS = [NARROW, WIDE, NARROW, SHALLOW]
DEPTHS = [SHALLOW, WIDE, SHALLOW, SHALLOW]
CLIENTS = [2, 1, 3]
PASSED = (4, 8, 12, 8)  # samples of an epoch: make_federation's 3, 7, 12 and 5, in batches of 4 that are filled up


def mixed(make_federation, kinds=KINDS, malicious=(), norm="batch", exits=False):
    """Clients of different widths and depths, some of whom attack."""
    wide, *kinds = (replace(spec, norm=norm, exits=exits) for spec in (WIDE, *kinds))
    model = wide.build(torch.Generator().manual_seed(0))
    fed = make_federation(model, spec=wide, fleet=make_fleet(model, wide, kinds) if kinds else None)
    return wrapped(fed, attack=Attack(frozenset(malicious), fed.data, 1.0))


def test_architecture_table__the_roster_counts_as_the_zoo_does(make_federation, tmp_path):
    fed = mixed(make_federation, malicious={1, 2})
    rows = architecture_rows(fed)
    assert [row["clients"] for row in rows] == ["0 2", "3", "1"]  # by parameters
    for row, spec, bad in zip(rows, (NARROW, SHALLOW, WIDE), (1, 0, 1)):
        count, buffers = spec.count(), sum(buffer.nbytes for buffer in spec.build().buffers())
        assert (row["parameters"], row["macs"]) == count
        assert row["bytes_down"] == row["bytes_up"] == 4 * count.parameters + buffers
        assert (row["count"], row["malicious"]) == (len(row["clients"].split()), bad)
        assert (row["width"], row["depth"]) == (f"{spec.width[0]:g}", "1" if spec is SHALLOW else "2-1-1")
    save_architectures(fed, tmp_path)
    with open(tmp_path / FILE, newline="") as file:
        written = list(csv.DictReader(file))
    assert " ".join(written[0]) == "width depth parameters macs bytes_down bytes_up count malicious clients"
    assert written == [{k: str(v) for k, v in row.items()} for row in rows]


CUT = [name for name in methods_of("heterogeneous") if name not in NEED_ADAPTERS]
MEASURED = ["ditto", "fedasam", "fedrep", "fedfa"]


@pytest.mark.parametrize("name", some(["fedavg", *MEASURED[:3], *CUT], MEASURED))
def test_architecture_table__the_meter_by_hand(make_federation, name):
    """Samples in whole batches, times passes over them (two epochs; ditto has two models, and SAM two passes a step),
    times the forward pass of the client's own model. What attackers compute beside is not counted.
    """
    kinds = DEPTHS if name in ("flexifed", "inclusivefl") else KINDS if name in methods_of("heterogeneous") else []
    exits = name in NEED_EXITS
    fed = mixed(make_federation, kinds, malicious={2}, exits=exits)
    algorithm = made(name, fed)
    server = algorithm.init()
    fed.meter.read()
    algorithm.round(server, CLIENTS, Rng(0, 1))
    passes = {"ditto": 2 + 2, "fedasam": 2 * 2, "fedrep": 2 + OPTIONS["fedrep"].head_epochs}.get(name, 2)
    macs = sum(
        PASSED[client] * passes * replace((kinds or [WIDE] * 4)[client], exits=exits).count().macs for client in CLIENTS
    )
    assert fed.meter.read() == 2 * macs
    assert fed.meter.read() == 0


def test_simulate__the_column_of_macs_is_a_participant_s_mean(tmp_path):
    options = ArchitectureOptions((0.5, 1.0), choose="cycle")
    config = Config.of(
        algorithm="fedfa", clients=4, participants=4, rounds=2, local_epochs=2, width=0.1, architectures=options,
        partition="iid", batch_size=200,
    )  # fmt: skip
    simulate(config, tmp_path / "a")
    fed, _ = build(config)
    assert fed.clients.train.largest == 360
    expected = sum(2 * 400 * fed.fleet[k].spec.count().macs for k in range(4)) / 4  # two batches of 200 an epoch
    assert [row["macs"] for row in read(tmp_path / "a" / "metrics.csv")] == [pytest.approx(expected)] * 2
    assert len({fed.fleet[k].spec.count().macs for k in range(4)}) == 2


@pytest.mark.parametrize(
    ("name", "panels"),
    [
        ("fedfa", ["without grafting", "with grafting"]),
        ("nefl", ["clients' models"]),
        ("fedrolex", []),  # its windows move
        ("flexifed", []),  # its layers lie in a tree
    ],
)
def test_architecture_table__coverage_is_drawn_as_the_method_has_it(
    make_federation, tmp_path, monkeypatch, name, panels
):
    drawn = []
    monkeypatch.setattr("fl.figures.coverage.save", lambda figure, _: drawn.append(figure))
    fed = mixed(make_federation, DEPTHS if name == "flexifed" else KINDS)
    leave_coverage(RunState(Config(), fed, made(name, fed), tmp_path, {}, 0))
    assert [axis.get_title() for figure in drawn for axis in figure.axes if axis.get_title()] == panels
    assert all(figure.get_suptitle() == Config().title() for figure in drawn)


def by_hand(fed, cohort, statistics):
    """Accuracy of each model on all test images, and on those of its classes among its classes."""
    for client, model, state in zip(cohort.clients, cohort.models, cohort.states):
        asked = copy.deepcopy(model).eval()
        asked.load_state_dict(state | statistics(client, model, state))
        logits, y = asked(fed.data.normalise(fed.data.test_x)), fed.data.test_y
        classes = fed.data.y[fed.clients.train[client]].unique()
        mine = torch.isin(y, classes)
        own = classes[logits[mine][:, classes].argmax(1)] == y[mine]
        yield (logits.argmax(1) == y).double().mean().item(), own.double().mean().item()


@pytest.mark.parametrize("norm", ["batch", "static_batch"])
def test_architecture_table__participants_models_by_hand(make_federation, norm):
    """Client 2 has all classes, 1 and 3 lack some; client 0 is malicious and not asked."""
    fed = mixed(make_federation, malicious={0}, norm=norm)
    y = fed.data.y.clone()
    y[fed.clients.train[1]] = 1 + torch.arange(7) % 2
    y[fed.clients.train[3]] = 2 * (torch.arange(5) % 2)
    fed = replace(fed, data=replace(fed.data, y=y))
    generator = torch.Generator().manual_seed(5)
    states = [
        {n: t + 0.3 * torch.rand(t.shape, generator=generator) for n, t in surgery.state(fed.fleet[k].model).items()}
        for k in (2, 0, 1, 3)
    ]
    cohort = evaluate.honest_cohort(fed, states, [2, 0, 1, 3], [True] * 4)
    assert cohort.clients == [2, 1, 3]
    assert cohort.models == [fed.fleet[k].model for k in (2, 1, 3)]
    assert cohort.states[1] is states[2]

    def statistics(client, model, state):
        if norm == "batch":
            return {}
        images = fed.data.normalise(fed.data.x[fed.clients.train[client]])
        return zoo.collect_statistics(model, [images], state)

    all_right, own_right = zip(*by_hand(fed, cohort, statistics))
    result = evaluate.evaluate_models(fed, cohort)
    spread = torch.tensor(all_right, dtype=torch.float64).std(correction=0).item()
    assert result == {
        "models_accuracy": pytest.approx(sum(all_right) / 3),
        "models_std": pytest.approx(spread),
        "models_own_accuracy": pytest.approx(sum(own_right) / 3),
    }
    assert own_right[0] == all_right[0]
    assert own_right[1:] != all_right[1:]
    assert evaluate.honest_cohort(fed, states, [2, 0, 1, 3], [False, True, True, False]).clients == [1]
    nobody = evaluate.honest_cohort(fed, states, [2, 0, 1, 3], [False, True, False, False])
    assert evaluate.evaluate_models(fed, nobody) == {}


def test_architecture_table__a_stacked_cohort_is_without_the_malicious_and_the_dropped(make_federation):
    fed = make_federation("cnn")
    fed = wrapped(fed, attack=Attack(frozenset({0}), fed.data, 1.0))
    states = {
        n: t + torch.arange(4.0).view(-1, *[1] * (t.ndim - 1)) for n, t in surgery.broadcast(fed.initial(), 4).items()
    }
    cohort = evaluate.honest_cohort(fed, states, [3, 0, 2, 1], [True, True, False, True])
    assert cohort.clients == [3, 1]
    assert all(torch.equal(tensor, states[name][[0, 3]]) for name, tensor in cohort.states.items())
    right = []
    for state in surgery.unstack(cohort.states):
        logits = surgery.load(fed.model, state)(fed.data.normalise(fed.data.test_x))
        right.append((logits.argmax(1) == fed.data.test_y).double().mean().item())
    assert evaluate.evaluate_models(fed, cohort)["models_accuracy"] == pytest.approx(sum(right) / 2)


def test_architecture_table__perplexity_of_participants_by_hand(make_federation):
    """The mean of each one's exp(mean loss)."""
    spec = Spec("transformer", 11, tokens=6, width=0.125, depth=1, dropout=0.0)
    fed = make_federation(spec.build(torch.Generator().manual_seed(0)), sizes=(3, 4), participants=2)
    words = torch.randint(11, (len(fed.data.y), 7), generator=torch.Generator().manual_seed(1))
    x, y = words[:, :-1].int(), words[:, 1:]
    fed = replace(fed, data=Dataset("words", x, y, x, y, classes=11))
    states = [{n: t * factor for n, t in fed.initial().items()} for factor in (1.0, 2.0)]
    logits = [surgery.load(fed.model, state).eval()(x.long()) for state in states]
    perplexities = [math.exp(F.cross_entropy(one.double().flatten(0, 1), y.flatten()).item()) for one in logits]
    result = evaluate.evaluate_models(fed, evaluate.Cohort([0, 1], [fed.model] * 2, states))
    assert result.keys() == {"models_accuracy", "models_std", "models_perplexity"}
    assert result["models_perplexity"] == pytest.approx(sum(perplexities) / 2, rel=1e-6)
    assert result["models_accuracy"] == pytest.approx(sum((o.argmax(2) == y).double().mean() for o in logits) / 2)
