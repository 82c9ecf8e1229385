"""A target of latency. A clock that counts stands for the time, so that what has to come out is known."""

import itertools
import logging

import numpy as np
import pytest
import torch
from command_files import NETS, in_folder_with, run, same
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from surgery import SurgeryError, Target, importance, narrow, prune, state
from surgery.torch_private import Watch
from surgery.width.attempts import Request, final
from surgery.width.choose import Demand
from surgery.width.latency import Latency, Timing, best_levels, seconds
from surgery.width.solve import Atom

pytestmark = pytest.mark.slow
OVERHEAD = 100  # of an operation, in the time of a multiply-accumulate


class _Count(Watch):
    number = 0

    def after(self, operation, args, kwargs, result):
        self.number += 1


def clock(*runs):
    """As many seconds as multiply-accumulates, and an overhead for each operation."""
    found = []
    for each in runs:
        with FlopCounterMode(display=False) as flops, _Count() as count:
            each()
        found.append(flops.get_total_flops() / 2 + OVERHEAD * count.number)
    return found


def ticks(model, x):
    with torch.no_grad():
        return clock(lambda: model.eval()(x))[0]


def mlp():
    torch.manual_seed(0)
    layers = [nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)]
    return nn.Sequential(*layers).train(), torch.randn(32, 16)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(24), nn.Linear(24, 96), nn.Linear(32, 24)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return x + self.out(y.transpose(1, 2).reshape(*x.shape[:2], 32))


def transformer():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 24), Attention(), Attention(), nn.Linear(24, 3)), torch.randn(2, 7, 6)


def convolutional():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, groups=4), nn.GroupNorm(4, 32)]
    layers += [nn.ConvTranspose2d(32, 20, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(80, 5)]
    return nn.Sequential(*layers), torch.randn(2, 3, 9, 9)


MODELS = [mlp, transformer, convolutional]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "scored", "share"),
    [
        (mlp, True, 0.5),
        (transformer, False, 0.5),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(mlp, False, 0.8), (transformer, True, 0.8)]),
        *(pytest.param(convolutional, scored, 0.5, marks=pytest.mark.slow) for scored in (True, False)),
    ],
)
def test_what_is_measured_is_within_the_target_and_close_to_it(made, scored, share):
    model, x = made()
    scores = importance(model, example=x) if scored else None
    small, plan = narrow(model, example=x, target=Target(latency=share, clock=clock), keep_top=scores)
    assert 0.94 * share <= ticks(small, x) / ticks(model, x) <= share
    assert {name: t.shape for name, t in plan.extract(model).items()} == {n: t.shape for n, t in state(small).items()}


@pytest.mark.parametrize("made", MODELS)
@pytest.mark.parametrize("rate", [0.3, 0.5, 0.8])
def test_operations_alone_predict_the_whole(made, rate):
    """With a clock that counts nothing is left to chance: the sum of operations at other sizes is the narrow model."""
    model, x = made()
    found = final(Request(model, x, Demand(rate)))
    timing = Timing(model, x, clock)
    cost = Latency(found.seen, found.solution, timing, x.device)
    assert found.chosen.choice
    expected = ticks(found.plan.build(model), x) / ticks(model, x)
    fused = made is transformer  # attention is one operation where it runs, and several in the trace
    assert cost.predicted(found.chosen.choice) == pytest.approx(expected, rel=0.05 if fused else 1e-6)
    assert cost.predicted({}) == pytest.approx(1)


LEVELS = st.lists(st.integers(1, 8), min_size=1, max_size=3, unique=True).map(sorted)


@st.composite
def programs(draw):
    widths = [Atom(8) for _ in range(draw(st.integers(1, 3)))]
    levels = {atom: draw(LEVELS) for atom in widths}
    groups = [group for n in range(4) for group in itertools.combinations(widths, n)]
    tables = {}
    for group in draw(st.lists(st.sampled_from(groups), min_size=1, max_size=4, unique=True)):
        shape = tuple(len(levels[atom]) for atom in group)
        numbers = draw(st.lists(st.integers(0, 9), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        tables[group] = np.array(numbers, float).reshape(shape)
    worth = {atom: [float(draw(st.integers(0, 9))) for _ in levels[atom]] for atom in widths}
    return levels, tables, worth, draw(st.integers(0, 30)) + 0.5


@pytest.mark.slow
@settings(max_examples=150)
@given(programs(), st.booleans())
def test_the_program_finds_what_trying_all_finds(program, scored):
    levels, tables, worth, budget = program

    def cost(numbers):
        at = {atom: levels[atom].index(n) for atom, n in numbers.items()}
        return sum(float(table[tuple(at[atom] for atom in group)]) for group, table in tables.items())

    free = [atom for atom, found in levels.items() if len(found) > 1]
    gap = max((b - a for atom in free for a, b in itertools.pairwise(levels[atom])), default=0) / 8 + 1e-6

    def value(numbers):
        if scored:
            return sum(worth[atom][levels[atom].index(n)] for atom, n in numbers.items())
        shares = [numbers[atom] / 8 for atom in free] or [1.0]
        return min(shares) + 0.01 * sum(shares) / len(shares) if max(shares) - min(shares) <= gap else -1

    every = [dict(zip(levels, numbers)) for numbers in itertools.product(*levels.values())]
    found = best_levels(levels, tables, worth if scored else None, budget)
    within = [numbers for numbers in every if cost(numbers) <= budget and value(numbers) >= 0]
    if within:
        assert cost(found) <= budget + 1e-6
        assert value(found) == pytest.approx(max(map(value, within)), abs=1e-5)
    else:
        assert cost(found) == pytest.approx(min(map(cost, every)))


@pytest.mark.slow
def test_more_important_positions_stay_than_of_any_other_sizes_that_are_as_fast():
    """Of all sizes of both widths that the target allows none keeps more than the program's, but for its steps."""
    model, x = mlp()
    scores = importance(model, example=x)
    small, _ = narrow(model, example=x, target=Target(latency=0.5, clock=clock), keep_top=scores)
    kept = [(values / values.mean()).sort(descending=True).values.cumsum(0) for values in scores.values()]
    full, overhead = ticks(model, x), ticks(model, x) - 32 * (16 * 64 + 64 * 96 + 96 * 10)

    def worth(a, b):
        return float(kept[0][a - 1] + kept[1][b - 1])

    sizes = itertools.product(range(7, 65), range(10, 97))
    best = max(worth(a, b) for a, b in sizes if overhead + 32 * (16 * a + a * b + b * 10) <= 0.5 * full)
    assert worth(small[0].out_features, small[2].out_features) >= 0.96 * best


@pytest.mark.slow
@pytest.mark.parametrize(("made", "power"), [(mlp, 0.7), (transformer, 1.5), (convolutional, 0.7)])
def test_a_wrong_prediction_is_corrected(made, power):
    """Whole models take another time than their operations alone: less, or more, the smaller they are."""
    model, x = made()
    full = ticks(model, x)

    def wrong(*runs):
        return [full * (one / full) ** power if len(runs) > 1 else one for one in clock(*runs)]

    small, _ = narrow(model, example=x, target=Target(latency=0.6, clock=wrong), keep_top=importance(model, example=x))
    assert 0.92 * 0.6 <= (ticks(small, x) / full) ** power <= 0.6  # some widths here have 8 positions


@pytest.mark.slow
def test_what_cannot_be_reached_says_how_far_it_comes():
    model, x = mlp()
    with pytest.raises(
        SurgeryError, match=r"latency=0\.01\) cannot be reached: .*% of the time, .* take a lower floor"
    ):
        narrow(model, example=x, target=Target(latency=0.01, clock=clock))


def test_a_target_between_two_sizes_is_told(caplog):
    model = nn.Sequential(nn.Linear(64, 2), nn.Linear(2, 64))
    with caplog.at_level(logging.WARNING):
        narrow(model, example=torch.randn(64, 64), target=Target(latency=0.9, clock=clock))
    assert "is missed by more than 5%" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3, [0.8, 0.5]])
def test_steps_fall_to_the_target(steps):
    model, x = mlp()
    found = prune(model, example=x, target=Target(latency=0.5, clock=clock), steps=steps)
    times = [size.latency for size in found.sizes]
    assert times[0] == ticks(model, x)
    assert all(a > b for a, b in itertools.pairwise(times))
    assert times[-1] == pytest.approx(ticks(found.model, x))
    assert 0.94 * times[0] <= 2 * times[-1] <= times[0]
    if steps == [0.8, 0.5]:
        assert 0.94 * 0.8 * times[0] <= times[1] <= 0.8 * times[0]


@pytest.mark.slow
def test_all_of_the_time_is_the_whole_model():
    model, x = mlp()
    small, _ = narrow(model, example=x, target=Target(latency=1.0, clock=clock))
    assert [*map(str, small)] == [*map(str, model)]


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    in_folder_with(monkeypatch, tmp_path, "timed_models", NETS)
    import timed_models

    torch.manual_seed(0)
    model = timed_models.net()
    save_file(model.state_dict(), "net.safetensors")
    monkeypatch.setattr("surgery.width.prune.seconds", clock)
    given = ("--model", "timed_models:net", "--input", "5", "--out", "small.safetensors")
    run("prune", "net.safetensors", "--latency", "0.9", *given)
    same("small.safetensors", state(prune(model, example=torch.zeros(2, 5), target=Target(latency=0.9)).model))


def test_other_targets_have_no_latency():
    model, x = mlp()
    assert "latency" not in repr(prune(model, example=x, target=Target(macs=0.5)).sizes)


@pytest.mark.slow
def test_seconds_tell_apart_what_takes_longer():
    a, b = torch.randn(64, 64), torch.randn(640, 640)
    short, long = seconds(lambda: a @ a, lambda: b @ b)
    assert 0 < 5 * short < long


@pytest.mark.slow
def test_a_real_network_takes_about_as_long_as_asked():
    timm = pytest.importorskip("timm")
    model, x = timm.create_model("resnet18", num_classes=10).eval(), torch.randn(1, 3, 64, 64)
    small, _, (full, cut) = prune(model, example=x, target=Target(latency=0.5))
    assert 0.35 * full.latency < cut.latency <= 0.5 * full.latency
    assert 0.3 < Timing(model, x, seconds).compared(small)[0] < 0.65
