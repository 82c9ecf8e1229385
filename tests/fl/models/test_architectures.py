from dataclasses import replace

import pytest
import torch
import yaml
from refusals import fl_refused
from selection import some

from fl import models
from fl.algorithms.fedfa import METHOD as fedfa
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.data.text import TextOptions
from fl.extensions.attack import AttackOptions
from fl.models import architectures
from fl.models.architectures import ArchitectureOptions, choose
from fl.models.fleet import make_fleet, plan_within
from fl.models.library import LibrarySpec
from fl.models.search import Space
from fl.runs.assembly import build
from fl.settings import Config, Experiment
from surgery import Plan, state
from zoo import Spec
from zoo.layers import Scaler

BASE = Spec("preresnet20", 3, 1, 8, width=0.125, depth=(2, 1, 1))
GRID = {"widths": (0.5, 1.0), "depths": ("1", "2-1-1")}


def chosen(fed, malicious=(), seed=0, base=BASE, **options):
    made = ArchitectureOptions(**{**GRID, **options})
    made.check()
    return choose(made, base, fed.data, fed.clients, 4, Rng(seed), frozenset(malicious))


@pytest.fixture(autouse=True)
def nothing_known(monkeypatch):
    """Of searches in other tests."""
    monkeypatch.setattr(architectures, "_CHOSEN", {})


@pytest.mark.slow
def test_architectures__half_take_the_smallest_and_the_others_what_scores_best_on_their_own_data(
    make_federation, monkeypatch
):
    """The score is a stand-in here: client 2k likes the second candidate best, client 2k + 1 the third."""
    fed = make_federation(sizes=(4, 7, 12, 5, 9, 8))
    space = list(Space(BASE, (0.5, 1.0), (1, (2, 1, 1))))
    seen = {}

    def score(model, batches):
        ((x, y), (other, _)) = batches
        rows = torch.cat([x, other]).flatten(1)
        own = [fed.data.normalise(fed.data.x[part]).flatten(1) for part in fed.clients.train]
        (owner,) = [k for k, part in enumerate(own) if all((part == row).all(1).any() for row in rows)]
        assert len(x) == len(other) == len(y) == min(4, len(own[owner]) // 2)
        assert not (x.flatten(1)[:, None] == other.flatten(1)).all(2).any()  # different samples
        seen.setdefault(owner, []).append(sum(p.numel() for p in model.parameters()))
        best = space[1 + owner % 2]
        return float(sum(p.numel() for p in model.parameters()) == best.count().parameters)

    monkeypatch.setattr(architectures, "zico", score)
    every = {seed: chosen(fed, seed=seed) for seed in range(6)}
    for specs in every.values():
        assert specs.count(space[0]) == 3
        assert all(spec in (space[0], space[1 + client % 2]) for client, spec in enumerate(specs))
    assert len({tuple(specs) for specs in every.values()}) > 1  # who is weak is drawn
    assert all(set(counts) == {spec.count().parameters for spec in space} for counts in seen.values())
    assert chosen(fed, seed=3) == every[3]
    assert chosen(fed, weak=1.0) == [space[0]] * 6
    assert space[0] not in chosen(fed, weak=0.0)
    bad = chosen(fed, {0, 1, 4}, seed=3)
    assert [bad[k] for k in (0, 1, 4)] == [space[3]] * 3  # the weak among them, too
    assert [bad[k] for k in (2, 3, 5)] == [every[3][k] for k in (2, 3, 5)]


@pytest.mark.nightly
def test_architectures__methods_in_turn_over_seeds_search_once_a_seed(make_federation, monkeypatch):
    fed, asked = make_federation(sizes=(8, 9), participants=1), []
    real = architectures.zico
    monkeypatch.setattr(architectures, "zico", lambda *args, **options: asked.append(1) or real(*args, **options))
    first = [chosen(fed, weak=0.0, seed=seed) for seed in (0, 1)]
    assert len(asked) == 2 * 2 * 4  # seeds, clients, candidates
    assert [chosen(fed, weak=0.0, seed=seed) for seed in (0, 1)] == first
    assert len(asked) == 16
    architectures._CHOSEN.clear()
    assert chosen(fed, weak=0.0) == first[0]
    other = replace(fed.data, x=fed.data.x.flip(0))
    choose(ArchitectureOptions(**GRID, weak=0.0), BASE, other, fed.clients, 4, Rng(0))
    assert len(asked) == 32  # of other data
    few = make_federation(sizes=(3, 2), participants=1)
    assert chosen(few, weak=0.0) == [Space(BASE, (0.5, 1.0), (1, (2, 1, 1))).smallest] * 2  # no two batches to compare


def test_architectures__in_turn_at_random_and_what_clients_can_afford(make_federation):
    fed = make_federation(sizes=(3,) * 9)
    space = list(Space(BASE, (0.5, 1.0), (1, (2, 1, 1))))
    assert chosen(fed, choose="cycle") == [space[k % 4] for k in range(9)]
    with fl_refused("argument", "--architectures.choose"):
        chosen(make_federation(sizes=(3, 3), participants=1), choose="cycle")
    paired = {"choose": "paired", "widths": (0.5, 0.5, 1.0), "depths": ("1", "2-1-1", "1")}
    assert chosen(fed, **paired) == [space[k] for k in (0, 1, 2)] * 3
    random = chosen(fed, choose="random")
    assert random == chosen(fed, choose="random") != chosen(fed, choose="random", seed=1)
    assert len(set(random)) > 1
    for unit in ("macs", "parameters"):
        sizes = [getattr(spec.count(), unit) for spec in space]
        budgets = (float(max(sizes)), float(sorted(sizes)[1]), sorted(sizes)[2] - 1.0)
        expected = [max((s for s in sizes if s <= limit), default=0) for limit in budgets]
        specs = chosen(fed, choose="budget", budgets=budgets, unit=unit)
        assert [getattr(spec.count(), unit) for spec in specs] == expected * 3
    with fl_refused("argument", "preresnet20"):
        chosen(fed, choose="budget", budgets=(9.0,), unit="parameters")
    for way in ({"choose": "cycle"}, {"choose": "random"}, {"choose": "budget", "budgets": (1e9, 5e4)}):
        honest, mixed = chosen(fed, **way), chosen(fed, {0, 2}, **way)
        assert mixed == [space[-1], honest[1], space[-1], *honest[3:]]


@pytest.mark.slow
def test_architectures__given_architectures_make_the_global_model_their_maximum(tmp_path):
    """Nobody has the global model: one is the widest, others the deepest of each section."""
    path = tmp_path / "fleet.yaml"
    depths = (1, [2, 1, 1], [1, 1, 2], [1, 1, 1])
    path.write_text(yaml.safe_dump([{"width": 0.5 if k else 1.0, "depth": depth} for k, depth in enumerate(depths)]))
    options = ArchitectureOptions((0.5, 1.0), ("1", "2"), mixed=True, choose="given", file=str(path))
    config = Config.of(
        algorithm="fedfa", model="preresnet20", width=0.125, clients=4, participants=2, architectures=options
    )
    with fl_refused("argument", "preresnet20"):
        build(config.replace(architectures=replace(options, mixed=False)))
    fed, _ = build(config)
    assert (fed.spec.width[0], fed.spec.depth) == (0.125, (2, 1, 2))
    assert [fed.fleet[k].spec.width[0] for k in range(4)] == [0.125, 0.0625, 0.0625, 0.0625]
    assert [fed.fleet[k].spec.depth for k in range(4)] == [(1, 1, 1), (2, 1, 1), (1, 1, 2), (1, 1, 1)]
    attacked, _ = build(config.replace(attack=AttackOptions(0.25, architecture="largest")))
    (bad,) = attacked.malicious
    assert attacked.fleet[bad].spec.depth == (2, 2, 2)  # of all that was announced
    assert attacked.spec.depth == (2, 2, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[{width: 0.5}, {width: 0.75}]", r"client 1 is refused: .*width 0.09375 \(announced: 0.0625, 0.125\)"),
        ("[{width: 0.5, depth: 3}, {}]", r"client 0 is refused: .*depth 3 \(announced: 1, 2-1-1\)"),
        ("[{width: -1, depth: [1, 2]}, {width: 1}]", "client 0 is refused"),
        ("[{width: wide, depth: 1}, {depth: 1}]", "client 0 is refused"),
        ("[{depth: 1}]", "has 1 architectures, and there are 2 clients"),
        ("{width: 1}", "is no list of architectures: write"),
        ("[{widht: 1}, {}]", "is no list of architectures"),
        ("[", "cannot be read"),
        (None, "cannot be read: .*No such file"),
    ],
)
def test_architectures__files_that_are_refused(make_federation, tmp_path, text, message):
    fed, path = make_federation(sizes=(3, 4), participants=1), tmp_path / "fleet.yaml"
    if text:
        path.write_text(text)
    with pytest.raises(FLError, match=message):
        chosen(fed, choose="given", file=str(path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"choose": "cycle", "weak": 0.2}, "--architectures.weak.*--architectures.choose"),
        ({"budgets": (1.0,)}, "--architectures.budgets.*--architectures.choose"),
        ({"choose": "budget"}, "--architectures.choose.*--architectures.budgets"),
        ({"choose": "paired"}, "needs a depth for each width, and there are 1 widths and 0 depths"),
        ({"choose": "paired", "depths": ("1",), "mixed": True}, "--arch"),
        ({"choose": "given"}, "--architectures.choose.*--architectures.file"),
        ({"depths": ("two",)}, "--architectures.depths"),
        ({"depths": ("1-2",)}, "no such candidate"),
    ],
)
def test_architectures__options_that_are_refused_before_anything_is_loaded(options, message):
    config = Config.of(algorithm="fedfa", model="preresnet20", architectures=ArchitectureOptions(**options))
    with pytest.raises(FLError, match=message):
        config.check()


def test_architectures__methods_with_one_model_refuse_architectures():
    options = ArchitectureOptions((0.5, 1.0))
    config = Experiment.of(algorithms=("fedfa", "fedavg"), model="preresnet20", architectures=options)
    with fl_refused("argument", "--architectures.widths"):
        config.check()


FAMILIES = {
    "preresnet18": (Spec("preresnet18", 3, 1, 8, width=0.125, norm="group"), (1, 2, 1, 1)),
    "mobilenetv2": (Spec("mobilenetv2", 3, 1, 8, width=0.25), (1, 2, 1, 2, 1, 1, 1)),
    "efficientnetv2_cifar": (Spec("efficientnetv2_cifar", 3, 1, 8, width=0.25), (1, 1, 2, 1, 2)),
    "timm:resnet18": (LibrarySpec("timm:resnet18", 3, 1, 8, width=0.125), (2, 1, 1, 1)),
}


def corner(full, model):
    """The leading entries on every axis, by the names that the small model's tensors have in the full one."""
    return {n: full[n][tuple(map(slice, t.shape))].clone() for n, t in model.state_dict().items()}


def moved(model):
    """A state with no two values alike, as after training."""
    generator = torch.Generator().manual_seed(3)
    return {
        n: t + 0.1 * torch.rand(t.shape, generator=generator) if t.is_floating_point() else t + 7
        for n, t in state(model).items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("family", some(FAMILIES, [name for name in FAMILIES if ":" not in name]))
def test_architectures__a_client_has_the_zoo_s_model_with_its_part_of_the_global_one(make_federation, family):
    spec, depth = FAMILIES[family]
    specs = [spec.scale(0.5, depth), spec.scale(0.5), spec.scale(1.0, depth), spec]
    specs = specs[::3] * 2 if ":" in family else specs  # which take long to make
    full = models.create(torch.Generator().manual_seed(0), spec)
    fed = make_federation(full, spec=spec, fleet=make_fleet(full, spec, specs))
    assert len(fed.fleet.architectures) == len(set(specs))
    server, x = {"global": moved(full)}, fed.data.test_x[:6]
    predict = fedfa(fed).predict
    for client, small in enumerate(specs):
        model = models.create(torch.Generator(), small).eval()
        part = corner(server["global"], model)
        taken = fed.fleet[client].plan.extract(server["global"])
        assert taken.keys() == part.keys()
        assert all(torch.equal(taken[name], part[name]) for name in part)
        model.load_state_dict(part)
        expected = model(fed.data.normalise(x))
        assert expected.std() > 0
        torch.testing.assert_close(fed.predict(taken, x, fed.fleet[client].model), expected)
        torch.testing.assert_close(predict(server, x, client), expected)
    torch.testing.assert_close(predict(server, x, None), predict(server, x, 3))
    assert not torch.allclose(predict(server, x, 0), predict(server, x, 3))


def test_architectures__clients_of_a_language_model():
    """On words of pydoc: the heads stay, each gets narrower."""
    options = ArchitectureOptions((0.5, 1.0), ("1", "2"), choose="cycle")
    config = Config.of(
        algorithm="fedfa", dataset="pydoc", model="transformer", partition="iid", clients=4, participants=2,
        width=0.25, text=TextOptions(vocabulary=100, length=16), samples=40, architectures=options, dropout=0.0,
    )  # fmt: skip
    fed, algorithm = build(config)
    server, tokens = {"global": moved(fed.model)}, fed.data.test_x[:3]
    for client in range(4):
        model = fed.fleet[client].spec.build().eval()
        model.load_state_dict(corner(server["global"], model))
        torch.testing.assert_close(algorithm.predict(server, tokens, client), model(tokens.long()))
    assert {fed.fleet[k].spec.depth for k in range(4)} == {(1,), (2,)}


def test_architectures__scalers_divide_by_the_rate_against_the_global_model(make_federation):
    spec = replace(BASE, scaler=True)
    full = spec.build(torch.Generator().manual_seed(0))
    fed = make_federation(full, spec=spec, fleet=make_fleet(full, spec, [spec, spec.scale(0.5)] * 2))
    for client, rate in ((0, 1.0), (1, 0.5)):
        assert {m.rate for m in fed.fleet[client].model.modules() if isinstance(m, Scaler)} == {rate}


def test_architectures__what_is_no_part_of_the_global_model_is_refused(make_federation):
    full, deeper, wider = BASE.build(torch.Generator()), BASE.scale(1.0, (2, 2, 1)), BASE.scale(2.0)
    for other, message in ((deeper, "depth 2,2,1 is no part .* depth 2,1,1"), (wider, "width 0.25 ")):
        with pytest.raises(FLError, match=message):
            make_fleet(full, BASE, [other])
    with fl_refused("argument"):
        make_federation(full, fleet=make_fleet(full, BASE, [BASE] * 3))


@pytest.mark.parametrize("stand", ["corner", "none"])
@pytest.mark.parametrize("depth", [(3, 2, 0), (2, 0, 0), (1, 2, 1)])
def test_architectures__a_model_with_exits_may_end_before_the_global_one(depth, stand):
    """Its tensors are the leading ones of those with their names, and its plan builds it out of the global model."""
    full = Spec("preresnet20", exits=True, norm="group", image_size=8, width=0.25)
    small = full.scale(0.5, depth=depth)
    model, part = (spec.build(torch.Generator().manual_seed(0)) for spec in (full, small))
    full_state, plan = model.state_dict(), plan_within(model, part, stand)
    expected = {name: full_state[name][tuple(map(slice, own.shape))] for name, own in part.state_dict().items()}
    found = plan.extract(full_state)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    part.load_state_dict(found)
    x = torch.randn(2, *full.example().shape[1:])
    built = Plan.from_json(plan.to_json()).build(model)
    assert torch.equal(built.train()(x), part.train()(x))
    covered = plan.embed(found)[1]
    ends = [f"section{i}." for i, blocks in enumerate(depth, 1) if not blocks]
    assert not any(covered[name].any() for name in full_state if name.startswith(tuple(ends)))
    assert all(covered[f"exit{i}.head.bias"].all() == bool(blocks) for i, blocks in enumerate(depth, 1))
