"""Pruning in steps: against torch-pruning's own steps, a loop by hand, and counts of torch."""

import copy
import math
import sys

import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from selection import some
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import surgery
from surgery import narrow, state
from surgery.pruning import Target, importance, prune
from surgery.width.choose import Demand, check_demand

X, Y = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(32) % 4


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(c, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24)
        self.conv2 = nn.Conv2d(24, c, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.relu(self.norm(self.conv1(x))))


class Summed(nn.Module):
    def forward(self, x):
        return x.cumsum(1)


def convolutions():
    torch.manual_seed(0)
    blocks = nn.Conv2d(1, 20, 3, padding=1), Block(20), nn.ReLU(), Block(20), nn.ReLU()
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(20, 4)).eval()


def linear(width=100):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))


def loss(net, batch):
    return F.cross_entropy(net(batch[0]), batch[1])


def size(net, x=X):
    counter = FlopCounterMode(display=False)
    with counter:
        net(x[:1])
    return counter.get_total_flops() // 2, sum(p.numel() for p in net.parameters())


def same(a, b):
    a, b = state(a), state(b)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("target", [Target(macs=0.4), Target(parameters=0.4)])
def test_prune__steps_go_down_to_the_target(target):
    net, seen = convolutions(), []
    before = copy.deepcopy(net)
    small, plan, sizes = prune(
        net, example=X[:1], target=target, steps=[0.8, 0.6, 0.4],
        finetune=lambda *given: seen.append((given[1], size(given[0]))),
    )  # fmt: skip
    same(net, before)
    assert [size(net), *(one for _, one in seen)] == [one[:2] for one in sizes]
    assert sizes[-1][:2] == size(small)
    assert [number for number, _ in seen] == [1, 2, 3]
    place = 0 if target.macs else 1
    for wanted, got in zip((0.8, 0.6, 0.4), sizes[1:]):
        assert 0.97 * wanted <= got[place] / sizes[0][place] <= wanted
    same(plan.build(net), small)
    torch.testing.assert_close(plan.build(net)(X), small(X), rtol=0, atol=0)
    again = surgery.Plan.from_json(plan.to_json())
    assert {n: tuple(t.shape) for n, t in again.extract(state(net)).items()} == again.small_shapes


@pytest.mark.parametrize("by", ["l1", "l2", "bn_scale", "taylor"])
def test_prune__one_step_is_narrow(by):
    net, given = convolutions(), {"batches": [(X, Y)], "loss": loss}
    keep = [] if by != "bn_scale" else ["0"]  # the stream has no norm
    small, plan, _ = prune(net, example=X[:1], target=Target(macs=0.5), importance=by, keep=keep, **given)
    scores = importance(net, example=X[:1], by=by, **given)
    ours, other, _ = prune(net, example=X[:1], target=Target(macs=0.5), importance=scores, keep=keep)
    assert plan == other
    same(small, ours)


@pytest.mark.parametrize("what", some(["macs", "parameters", "positions"], ["macs"]))
def test_prune__even_widths_keep_one_share_and_the_best_positions_of_each(what):
    net, target = convolutions(), Target(**{what: 0.3}, even=True)
    scores = importance(net, example=X[:1])
    small, plan, _ = prune(net, example=X[:1], target=target, rounding=2)
    rates = sorted((rate / 48 for rate in range(1, 49)), key=lambda rate: abs(rate - 0.5))  # it is near there
    assert any(plan == narrow(net, rate, X[:1], scores=scores, rounding=2)[1] for rate in rates)
    assert small[1].conv1.out_channels == small[3].conv1.out_channels
    assert small[1].conv1.out_channels % 2 == small[0].out_channels % 2 == 0


def test_prune__a_rounding_that_is_a_number_gives_its_multiples():
    net = linear()
    small, _ = narrow(net, 0.5, torch.zeros(1, 4), rounding=16)
    assert [small[0].out_features, small[2].out_features] == [64, 64]
    assert check_demand(net, Demand(0.5, rounding=1)).rounding is math.ceil  # with which more positions may be tried
    for wrong in (0, -1, 1.5, True, "8"):
        with refused("argument: rounding"):
            narrow(net, 0.5, torch.zeros(1, 4), rounding=wrong)


@pytest.mark.parametrize("by", ["l1", "l2", "taylor"])
@pytest.mark.parametrize("what", ["positions", "macs"])
def test_prune__steps_are_torch_prunings(by, what):
    """Its iterative pruner keeps the same positions in every step, with its own schedule and ratio."""
    tp = pytest.importorskip("torch_pruning")
    net, x, y = linear(), torch.randn(64, 4, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 4
    given, ours = {"example": x[:1], "importance": by, "batches": [(x, y)], "loss": loss}, []
    target = Target(**{what: 0.6 if what == "positions" else 0.35})
    plan = prune(net, target=target, steps=4, finetune=lambda small, _: ours.append(copy.deepcopy(small)), **given).plan
    left = ours[-1][0].out_features + ours[-1][2].out_features
    theirs = copy.deepcopy(net)
    criterion = {
        "l1": lambda: tp.importance.GroupMagnitudeImportance(p=1),
        "l2": tp.importance.GroupMagnitudeImportance,
        "taylor": tp.importance.GroupTaylorImportance,
    }[by]()
    pruner = tp.pruner.BasePruner(
        theirs, x[:1], criterion, global_pruning=True, iterative_steps=4, ignored_layers=[theirs[4]],
        pruning_ratio=1 - (left + 1e-3) / 200,
    )  # fmt: skip
    for small in ours:
        theirs.zero_grad()
        loss(theirs, (x, y)).backward()
        pruner.step()
        if what == "positions":
            same(small, theirs)
        else:  # how many will be left in the end is not known before, and corrected in every step
            assert abs(sum(a.out_features - b.out_features for a, b in zip(small[::2], theirs[::2]))) <= 2
    assert left < 125
    once = prune(net, target=target, **given).plan
    assert once != plan  # or the steps would not show


def test_prune__scores_are_asked_of_the_trained_model():
    """Training decides what the next step cuts: each step's scores are those of the model that it cuts."""
    net = linear(10)

    def train(model, step):
        with torch.no_grad():
            for layer in (model[0], model[2]):
                layer.weight.copy_(torch.rand(layer.weight.shape, generator=torch.Generator().manual_seed(step)))

    def loop(net):
        plan, full = None, size(net, torch.zeros(1, 4))[0]
        for step, share in enumerate((0.8, 0.4), 1):
            part = Target(macs=share * full / size(net, torch.zeros(1, 4))[0], floor=0)
            scores = importance(net, example=torch.zeros(1, 4), by="l1")
            net, one, _ = prune(net, example=torch.zeros(1, 4), target=part, importance=scores)
            plan = plan.compose(one) if plan else one
            train(net, step)
        return net, plan

    before = copy.deepcopy(net)
    steps = {"steps": [0.8, 0.4], "target": Target(macs=0.4, floor=0), "example": torch.zeros(1, 4)}
    small, plan, _ = prune(net, finetune=train, **steps)
    expected, by_hand = loop(net)
    same(net, before)
    same(small, expected)
    assert plan == by_hand
    returned, _, _ = prune(
        net, finetune=lambda model, step: (train(twin := copy.deepcopy(model), step), twin)[1], **steps
    )
    same(returned, expected)


def test_prune__the_floor_is_a_share_of_the_full_widths():
    net, floor = linear(10), 0.5
    with torch.no_grad():
        net[0].weight *= torch.logspace(0, -9, 10)[:, None]
    options = {"example": torch.zeros(1, 4), "target": Target(macs=0.45, floor=floor)}
    for steps in (1, 2, 5):
        small = prune(net, steps=steps, **options).model
        assert min(small[0].out_features, small[2].out_features) == 5


def test_prune__batches_of_a_generator_serve_every_step():
    net, read = linear(20), []
    data = (torch.randn(8, 4), torch.arange(8) % 4)
    options = {"example": torch.zeros(1, 4), "target": Target(macs=0.5), "steps": 2, "importance": "taylor"}
    once = prune(net, batches=(one for one in [data]), loss=loss, **options)
    again = prune(net, batches=[data], loss=lambda *given: read.append(1) or loss(*given), **options)
    assert once.plan == again.plan
    assert len(read) == 2


@pytest.mark.slow
def test_prune__importance_is_a_name_a_class_of_torch_pruning_or_a_function_of_a_model():
    tp = pytest.importorskip("torch_pruning")
    net, options = linear(20), {"example": torch.zeros(1, 4), "target": Target(macs=0.5), "steps": 3}
    theirs = tp.importance.GroupMagnitudeImportance(p=1)
    plans = [
        prune(net, importance=by, **options).plan
        for by in ("l1", theirs, lambda model: importance(model, example=torch.zeros(1, 4), by="l1"))
    ]
    assert plans[0] == plans[1] == plans[2]


def test_prune__scores_of_lamp_compete_as_they_stand():
    """torch-pruning compares them over all widths without another division; so the same positions stay."""
    tp = pytest.importorskip("torch_pruning")
    torch.manual_seed(0)  # LAMP's mean is the higher the fewer positions a width has
    net = nn.Sequential(nn.Linear(4, 100), nn.ReLU(), nn.Linear(100, 20), nn.ReLU(), nn.Linear(20, 4))
    theirs = copy.deepcopy(net)
    small, _, _ = prune(
        net, example=torch.zeros(1, 4), target=Target(macs=0.5, floor=0), importance=tp.importance.LAMPImportance()
    )
    left = small[0].out_features + small[2].out_features
    pruner = tp.pruner.BasePruner(
        theirs, torch.zeros(1, 4), tp.importance.LAMPImportance(), global_pruning=True,
        pruning_ratio=1 - (left + 0.5) / 120, ignored_layers=[theirs[4]],
    )  # fmt: skip
    pruner.step()
    same(small, theirs)


CRITERION = """
def largest(name, rows, axis):
    return rows.abs().amax(1) if name.endswith("weight") else None
"""


@pytest.mark.parametrize("steps", [1, 2])
def test_prune__a_criterion_of_a_file_of_its_own(tmp_path, monkeypatch, steps):
    (tmp_path / "strange_criteria.py").write_text(CRITERION)
    monkeypatch.syspath_prepend(tmp_path)
    import strange_criteria

    del sys.modules["strange_criteria"]
    largest = strange_criteria.largest
    given = {"example": torch.zeros(1, 4), "target": Target(macs=0.5), "steps": steps}
    net = linear(12)
    small, plan, _ = prune(net, importance=largest, **given)
    by_model, _, _ = prune(net, importance=lambda net: importance(net, example=given["example"], by=largest), **given)
    same(small, by_model)
    first = plan.entries["0.bias"][0].index[0]
    kept = [i for start, stop in first for i in range(start, stop)]
    weights = [net[0].weight.abs().amax(1), net[2].weight.abs().amax(0)]
    if steps == 1:
        assert kept == sum(weights).topk(len(kept)).indices.sort().values.tolist()


def test_prune__what_cannot_be_is_refused_before_any_training():
    net, options = linear(8), {"example": torch.zeros(1, 4), "target": Target(macs=0.5)}

    def fails(expected, **more):
        arguments = {"model": net, **options, **more}
        with refused(expected):
            prune(finetune=lambda *given: pytest.fail("trained in vain"), **arguments)

    fails("target", target=Target(macs=0.1, floor=0.5), steps=3)
    lost = nn.Sequential(nn.Linear(4, 12), Summed(), nn.Linear(12, 6), nn.ReLU(), nn.Linear(6, 2))
    with refused("target: 0.weight"):
        prune(lost, finetune=lambda *given: pytest.fail("trained in vain"), **{**options, "target": Target(macs=0.3)})
    fails("argument: target", target=0.5)
    fails("argument: dict", model={})
    fails("argument: `batches`", importance="taylor", loss=loss)
    fails("argument: 'hessian'", importance="hessian")
    fails("argument: 'taylor'", importance="tylor")
    fails("argument: <lambda>", importance=lambda name, rows: rows.sum(1))
    for nothing in (None, [1], "l1", torch.ones(8)):
        fails(f"argument: <lambda>(model) gives {type(nothing).__name__}", importance=lambda model, one=nothing: one)
    fails("argument", importance=lambda name, rows, axis: rows)
    fails("argument", importance=lambda model: {})
    fails("argument: `example`", example=None)
    for steps in (0, True, 2.5, [], [0.5, 0.7], [0.9, 0.6], [1.2, 0.5], "3"):
        fails("argument: steps=", steps=steps)
    for wrong in (3, lambda model: None):
        with refused("argument: finetune"):
            prune(net, finetune=wrong, **options)
    with refused("mismatch: 0.weight"):
        prune(net, finetune=lambda model, step: linear(8), **options)
    with refused("argument"):
        prune(net, finetune=lambda model, step: 0.5, **options)


def test_prune__a_target_missed_in_the_end_is_told(caplog):
    net, rounding = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 4)), lambda n: max(8, 8 * int(n // 8))
    *_, sizes = prune(net, example=torch.zeros(1, 4), target=Target(macs=0.6), steps=2, rounding=rounding)
    assert sizes[-1].macs == 64
    assert "33.3%" in caplog.records[-1].message
    prune(net, example=torch.zeros(1, 4), target=Target(parameters=160), rounding=rounding)
    assert "parameters=160" in caplog.records[-1].message
    assert "148 parameters" in caplog.records[-1].message


def test_prune__a_count_that_reads_as_a_percentage_names_the_share():
    with refused("target: macs=0.5"):
        prune(linear(), example=torch.zeros(1, 4), target=Target(macs=50))
    with refused("target") as caught:
        prune(linear(), example=torch.zeros(1, 4), target=Target(macs=101))
    assert "%" not in str(caught.value).replace("%) are left", "")


@pytest.mark.parametrize(
    ("importance", "finetune", "norms", "told"),
    [
        ("taylor", None, True, True),
        ("activation", None, True, True),
        ("taylor", lambda net, step: surgery.symmetry.repair(net, batches=[X]), True, False),
        ("taylor", None, False, False),
        ("l1", None, True, False),
    ],
)
def test_prune__scores_by_old_statistics_are_warned_of(importance, finetune, norms, told, caplog):
    net = convolutions() if norms else linear(20)
    x = X if norms else torch.zeros(32, 4)
    batches = [x] if importance == "activation" else [(x, Y)]
    given = {"batches": batches, "loss": loss, "importance": importance, "finetune": finetune}
    prune(net, example=x[:1], target=Target(macs=0.5), **given)
    assert "statistics" not in caplog.text
    prune(net, example=x[:1], target=Target(macs=0.5), steps=2, **given)
    assert ("statistics" in caplog.text) == told


def test_prune__what_stays_whole_is_told_once(caplog):
    net = nn.Sequential(nn.Linear(4, 12), Summed(), nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 2))
    prune(net, example=torch.zeros(1, 4), target=Target(macs=0.7), steps=4)
    assert caplog.text.count("0.weight (12, 4)") == 1


class Attention(nn.Module):
    """Whose code splits queries and values by one attribute, so that both must get equally many positions a head."""

    def __init__(self, c, heads=4):
        super().__init__()
        self.head_dim = c // heads
        self.norm, self.q, self.k, self.v, self.o = nn.LayerNorm(c), *(nn.Linear(c, c) for _ in range(4))

    def forward(self, x):
        y = self.norm(x)
        q, k, v = (f(y).view(*x.shape[:-1], -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*x.shape[:-1], -1))


@pytest.mark.slow
@pytest.mark.parametrize("macs", [0.75, 0.85])
def test_prune__widths_that_code_needs_equal_are_so_in_all_blocks_of_a_class(caplog, macs):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(8, 64), *(Attention(64) for _ in range(6)), nn.Linear(64, 8)), torch.randn(2, 6, 8)
    small, _, sizes = prune(net, example=x, target=Target(macs=macs))
    assert macs - 0.05 < sizes[-1].macs / sizes[0].macs <= macs
    assert "stays whole" not in caplog.text
    for block in small[1:-1]:
        q, v = block.q.out_features, block.v.out_features
        assert q == v == 4 * block.head_dim


class Mixed(nn.Module):
    """Takes the width of its values for that of the stream."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out = nn.Linear(6, 12), nn.Linear(12, 36), nn.Linear(12, 12)
        self.up, self.down, self.head = nn.Linear(12, 24), nn.Linear(24, 12), nn.Linear(12, 4)

    def forward(self, x):
        x = self.embed(x)
        b, n, d = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, 3, d // 3).permute(2, 0, 3, 1, 4)
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, d))
        return self.head(x + self.down(self.up(x).relu()))


def test_prune__a_coupling_with_which_a_target_is_out_of_reach_is_not_the_last_one(monkeypatch):
    from surgery.width import attempts

    torch.manual_seed(0)
    net, example, asked = Mixed(), torch.randn(2, 5, 6), []
    real, couplings = attempts.make_attempt, attempts._propose_couplings

    def attempt(request, known):
        asked.append(known)
        if len([one for one in asked if one.couplings]) == 1 and known.couplings:
            raise attempts.Unreachable("out of reach", code="target")
        return real(request, known)

    monkeypatch.setattr(attempts, "make_attempt", attempt)
    monkeypatch.setattr(
        attempts, "_propose_couplings", lambda *given: (one for one in couplings(*given) for _ in range(2))
    )
    scores = surgery.pruning.importance(net, example=example, by="l1")
    small = prune(net, target=Target(macs=0.5), importance=scores, example=example).model
    assert len(asked) > 2, "no coupling was tried a second time"
    assert small(example).shape == (2, 5, 4)


def test_prune__a_width_of_one_position_needs_no_scores():
    from surgery.width.choose import scores_of
    from surgery.width.solve import Atom

    assert scores_of(Atom(1), {}, None).tolist() == [0]


class Padded(nn.Module):
    """Option A of He et al. 2016: channels of zeros beside the shortcut, as many on either side."""

    def __init__(self):
        super().__init__()
        self.stem, self.conv1 = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, 2, padding=1)
        self.conv2, self.head = nn.Conv2d(32, 32, 3, padding=1), nn.Linear(32, 4)

    def forward(self, x):
        x = F.relu(self.stem(x))
        y = self.conv2(F.relu(self.conv1(x)))
        more = (y.shape[1] - x.shape[1]) // 2
        return self.head((y + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, more, more))).mean((2, 3)))


class Chunked(nn.Module):
    """Three parts, of which the last is shorter."""

    def __init__(self):
        super().__init__()
        self.first, self.parts, self.last = nn.Linear(64, 30), nn.Linear(30, 50), nn.Linear(50, 4)

    def forward(self, x):
        parts = self.parts(self.first(x.flatten(1)).relu()).chunk(3, -1)
        return self.last(torch.cat([part.sigmoid() for part in parts], -1))


@pytest.mark.parametrize("net", [Padded, Chunked])
@pytest.mark.parametrize(
    "target", [Target(macs=0.5), Target(macs=0.3), Target(parameters=0.5), Target(macs=0.6, even=True)]
)
def test_prune__parts_that_the_code_makes_equal_reach_a_target(net, target):
    torch.manual_seed(0)
    model = net().eval()
    small, plan, sizes = prune(model, example=X[:2], target=target)
    share = (
        sizes[-1].parameters / sizes[0].parameters if target.measure == "parameters" else sizes[-1].macs / sizes[0].macs
    )
    assert 0.75 * target.share < share <= target.share
    if net is Padded:
        full = surgery.load(model, plan.embed(state(small))[0])
        torch.testing.assert_close(small(X), full.eval()(X), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(("steps", "importance", "even"), [(1, "l1", False), (2, None, False), (1, None, True)])
def test_prune__numbers_and_several_limits(steps, importance, even):
    net, options = convolutions(), {"example": X[:1], "importance": importance, "steps": steps}
    full = prune(net, target=Target(macs=1.0), example=X[:1]).sizes[0]
    for limits in (
        {"parameters": full.parameters // 2},
        {"macs": float(full.macs // 2), "parameters": 0.9},
        {"macs": 0.6, "parameters": 0.5, "positions": 0.7},
        {"macs": 10**12, "parameters": 0.5},
    ):
        small, _, sizes = prune(net, target=Target(**limits, floor=0, even=even), **options)
        uses = [
            value / (limit if limit > 1 else limit * whole)
            for what, limit in limits.items()
            if what != "positions"
            for value, whole in [(getattr(sizes[-1], what), getattr(full, what))]
        ]
        assert max(uses) <= 1
        assert "positions" in limits or even or max(uses) > 0.9  # as nearly as whole positions allow
        assert sum(p.numel() for p in small.parameters()) == sizes[-1].parameters
    alone = prune(net, target=Target(parameters=0.5, even=even), **options)
    both = prune(net, target=Target(parameters=0.5, macs=1.0, even=even), **options)
    by_number = prune(net, target=Target(parameters=full.parameters * 0.5 // 1, even=even), **options)
    assert alone.sizes[-1] == both.sizes[-1] == by_number.sizes[-1]


def test_prune__limits_that_are_none():
    for wrong in ({}, {"macs": 1.5}, {"macs": 0}, {"parameters": -4}, {"parameters": float("inf")}, {"macs": True}):
        with refused("argument"):
            Target(**wrong)
    with refused("argument"):
        prune(linear(8), example=torch.zeros(1, 4), target=Target(parameters=40), steps=[0.9, 0.5])
    with refused("target"):
        prune(linear(8), example=torch.zeros(1, 4), target=Target(parameters=0.9, macs=2))
