"""Means along lines and arcs, compared with the formulas written out for single tensors."""

import math

import pytest
import torch

import surgery
from surgery import SurgeryError, merge


def models(k=3, seed=0, dtype=torch.float64):
    """Models with tensors of several shapes and a counter."""
    draw = torch.Generator().manual_seed(seed)
    shapes = {"a.weight": (4, 3, 2), "a.bias": (4,), "b.scale": ()}
    result = [{name: torch.randn(s, generator=draw, dtype=dtype) for name, s in shapes.items()} for _ in range(k)]
    return [state | {"a.steps": torch.tensor(10 * i + 3)} for i, state in enumerate(result)]


def close(found, expected, **tolerances):
    assert list(found) == list(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], equal_nan=True, **tolerances)


def same(found, expected):
    close(found, expected, rtol=0, atol=0)


def by_tensor(function, states):
    """A formula for float tensors; for counters the maximum."""
    largest = {name: torch.stack([s[name] for s in states]).amax(0) for name in ("a.steps",)}
    return {name: largest[name] if name in largest else function(*[s[name] for s in states]) for name in states[0]}


def slow_slerp(x, y, t):
    angle = math.acos((x * y).sum() / x.norm() / y.norm()) if x.ndim else 0.0
    if angle < 1e-6:
        return (1 - t) * x + t * y
    return (math.sin((1 - t) * angle) * x + math.sin(t * angle) * y) / math.sin(angle)


def slow_karcher(weights, *tensors):
    """Gradient descent with the tensors themselves."""
    units, lengths = [x / x.norm() for x in tensors], [x.norm() for x in tensors]
    mean = sum(w * u for w, u in zip(weights, units))
    mean = mean / mean.norm()
    for _ in range(2000):
        step = torch.zeros_like(mean)
        for w, u in zip(weights, units):
            angle = torch.acos((mean * u).sum().clamp(-1, 1))
            if angle > 1e-9:
                step = step + w * angle / angle.sin() * (u - angle.cos() * mean)
        if step.norm() < 1e-13:
            break
        mean = mean * step.norm().cos() + step / step.norm() * step.norm().sin()
        mean = mean / mean.norm()
    return sum(w * n for w, n in zip(weights, lengths)) * mean


def test_linear_is_the_weighted_mean():
    states = models()
    expected = by_tensor(lambda x, y, z: (1 * x + 2 * y + 5 * z) / 8, states)
    close(merge.linear(states, weights=[1, 2, 5]), expected)
    close(merge.linear(surgery.stack(states), weights=torch.tensor([1, 2, 5])), expected)
    close(merge.linear(states), surgery.average(states))
    close(
        merge.linear(states, weights=[1, -2, 0.5], normalize=False),
        by_tensor(lambda x, y, z: x - 2 * y + z / 2, states),
    )


def test_slerp_is_shoemakes_formula():
    states, base = models(2), models(1, seed=5)[0]
    close(merge.slerp(states, t=0.3), by_tensor(lambda x, y: slow_slerp(x, y, 0.3), states))
    expected = by_tensor(lambda x, y, o: o + slow_slerp(x - o, y - o, 0.3), [*states, base])
    expected["a.steps"] = states[1]["a.steps"]
    close(merge.slerp(states, t=0.3, base=base), expected)


def test_multislerp_as_it_is_written_in_mergekit():
    weights = [0.2, 0.5, 0.3]

    def slow(*tensors):
        flat = torch.stack([x.reshape(-1) for x in tensors])
        w, lengths = torch.tensor(weights, dtype=flat.dtype)[:, None], flat.norm(dim=1, keepdim=True)
        units = flat / lengths
        mean = (w * units).sum(0)
        mean = mean / mean.norm()
        tangent = (w * (units - (units @ mean)[:, None] * mean)).sum(0)
        size = tangent.norm() + 1e-300
        moved = mean * size.cos() + tangent * size.sin() / size
        return (moved * (w * lengths).sum()).view(tensors[0].shape)

    states = models()
    for state in states:
        state["b.scale"] = state["b.scale"].abs()
    close(merge.multislerp(states, weights=[2, 5, 3]), by_tensor(slow, states))


def test_karcher_is_the_center_of_angles():
    states, weights = models(), [0.2, 0.5, 0.3]
    for state in states:
        state["b.scale"] = state["b.scale"].abs()
    close(
        merge.karcher(states, weights=[2, 5, 3]),
        by_tensor(lambda *tensors: slow_karcher(weights, *tensors), states),
        rtol=1e-9,
        atol=1e-9,
    )


def test_karcher_of_two_of_one_length_is_the_middle_of_their_arc():
    unit = [{"w": torch.nn.functional.normalize(s["a.weight"].view(-1), dim=0)} for s in models(2)]
    close(merge.karcher(unit), merge.slerp(unit, t=0.5))
    close(merge.multislerp(unit), merge.slerp(unit, t=0.5))
    close(merge.karcher(unit, weights=[3, 1]), merge.slerp(unit, t=0.25))


def test_karcher_of_models_that_are_hardly_apart():
    base = models(1)[0]["a.weight"]
    draw = torch.Generator().manual_seed(1)
    near = [{"w": base + 1e-4 * torch.randn(base.shape, generator=draw, dtype=base.dtype)} for _ in range(3)]
    close(merge.karcher(near), merge.linear(near), rtol=1e-6, atol=1e-7)
    close(merge.karcher([{"w": base}] * 3), {"w": base})


def test_nearswap_moves_by_at_most_t():
    (other,), base = models(1), models(1, seed=4)[0]

    def slow(x, o):
        weight = (0.7 / (x - o).abs()).clamp(0, 1)
        return weight * x + (1 - weight) * o

    close(merge.nearswap([other], base=base, t=0.7), by_tensor(slow, [other, base]))
    same(merge.nearswap([other], base=base, t=100.0), other)
    same(merge.nearswap([other], base=base, t=0), base)


def test_large_numbers_are_finite():
    largest = {"w": torch.full((64,), torch.finfo(torch.float32).max / 2)}
    same(merge.ties([largest, largest], base={"w": torch.zeros(64)}, density=1.0), largest)
    with pytest.raises(SurgeryError, match=r"'w' of model 0 \(from 0\) holds numbers too large for a direction"):
        merge.slerp([{"w": torch.full((2,), 1e200, dtype=torch.float64)}] * 2)
