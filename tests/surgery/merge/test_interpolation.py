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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_for_one_model_gives_that_model_bit_for_bit(dtype):
    states = models(dtype=dtype)
    states[0]["a.bias"][0] = math.nan
    for method in (merge.linear, merge.multislerp, merge.karcher):
        same(method(states, weights=[0, 7, 0]), states[1])
    same(merge.slerp(states[1:], t=0), states[1])
    same(merge.slerp(states[1:], t=1), states[2])


def test_nothing_given_is_changed():
    states, base = models(), models(1, seed=9)[0]
    before = [{name: tensor.clone() for name, tensor in state.items()} for state in (*states, base)]
    for name, method in merge.METHODS.items():
        few = states[: {"slerp": 2, "nearswap": 1}.get(name, 3)]
        own = {"base": base} if method.base != "none" else {}
        own |= {"t": 0.3} if name == "nearswap" else {"density": 0.5} if "density" in method.settings else {}
        method.function(few, **own)
    for now, then in zip((*states, base), before):
        same(now, then)


def test_slerp_is_shoemakes_formula():
    states, base = models(2), models(1, seed=5)[0]
    close(merge.slerp(states, t=0.3), by_tensor(lambda x, y: slow_slerp(x, y, 0.3), states))
    expected = by_tensor(lambda x, y, o: o + slow_slerp(x - o, y - o, 0.3), [*states, base])
    expected["a.steps"] = states[1]["a.steps"]
    close(merge.slerp(states, t=0.3, base=base), expected)


def test_settings_by_pattern():
    states = models(2)
    found = merge.slerp(states, t={"a.bias": 0, "a": 1})
    assert torch.equal(found["a.bias"], states[0]["a.bias"])
    assert torch.equal(found["a.weight"], states[1]["a.weight"])
    torch.testing.assert_close(found["b.scale"], (states[0]["b.scale"] + states[1]["b.scale"]) / 2)
    found = merge.linear(states, weights={"a.weight": [0, 1], "*": [1, 0]})
    same(found, states[0] | {"a.weight": states[1]["a.weight"]})


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


@pytest.mark.parametrize("method", [merge.linear, merge.multislerp, merge.karcher])
def test_the_order_of_models_does_not_matter(method):
    states = models()
    for state in states:
        state["b.scale"] = state["b.scale"].abs()
    close(method([states[2], states[0], states[1]], weights=[3, 1, 2]), method(states, weights=[1, 2, 3]))


def test_what_cannot_be_merged_is_named():
    a, b = models(2)
    for wrong, text in [
        ({name: t for name, t in b.items() if name != "a.bias"}, "'a.bias' of model 0 is missing in model 1"),
        (b | {"a.bias": torch.zeros(5)}, r"'a.bias' has shape \(4,\) in model 0 and \(5,\) in model 1"),
        (b | {"a.steps": torch.zeros(())}, "'a.steps' is torch.int64 in model 0 and torch.float32 in model 1"),
        (b | {"a.bias": torch.zeros(4, dtype=torch.complex64)}, "'a.bias' of model 1 is torch.complex64"),
        (b | {"a.bias": torch.zeros(4, device="meta")}, "'a.bias' is on cpu in model 0 and on meta in model 1"),
    ]:  # fmt: skip
        with pytest.raises(SurgeryError, match=text):
            merge.linear([a, wrong])
    opposite = [{"w": torch.tensor([1.0, 2.0])}, {"w": torch.tensor([-1.0, -2.0])}]
    for method, text in [(merge.slerp, "opposite"), (merge.multislerp, "cancel"), (merge.karcher, "cancel")]:
        with pytest.raises(SurgeryError, match=f"'w'.*{text}"):
            method(opposite)
    axes = [{"w": x} for x in (*torch.eye(2), *-torch.eye(2))]
    with pytest.raises(SurgeryError, match="cancel"):
        merge.karcher(axes)
    with pytest.raises(SurgeryError, match="no unique mean"):
        merge.karcher([*axes, {"w": torch.tensor([1.0, 0.0])}])
    for call, text in [
        (lambda: merge.slerp([a, b, a]), "merges 2 models, got 3"),
        (lambda: merge.slerp([a, b], t=1.5), "t=1.5 is out of range"),
        (lambda: merge.slerp([a, b], t={"a": "x"}), "t='x' for 'a' is no finite number"),
        (lambda: merge.slerp([a, b], t={"c": 0.5}), "no tensor matches 'c'"),
        (lambda: merge.linear([a, b], weights=[1]), "2 finite numbers"),
        (lambda: merge.linear([a, b], weights=[1, -1]), "not negative"),
        (lambda: merge.linear([a, b], weights=[0, 0]), "all models have the weight 0"),
        (lambda: merge.linear([a, b], weights={"x": [1, 1]}), "weights: no tensor matches 'x'"),
        (lambda: merge.linear(a | {}), "stack"),
        (lambda: merge.linear(5), "not a int"),
        (lambda: merge.linear([]), "no models"),
    ]:
        with pytest.raises(SurgeryError, match=text):
            call()


@pytest.mark.parametrize("name", [*merge.METHODS, "fisher", "regmean", "greedy_soup"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_an_error_of_every_method(name, value):
    good, bad = {"w": torch.tensor([[1.0, 3.0]])}, {"w": torch.tensor([[1.0, value]])}
    own = merge.METHODS.get(name)
    method = own.function if own else getattr(merge, name)
    more = {"t": 0.3} if name == "nearswap" else {}
    more |= {"fishers": [{"w": torch.ones(1, 2)}] * 2} if name == "fisher" else {}
    more |= {"grams": [{"w": torch.eye(2)}] * 2} if name == "regmean" else {}
    more |= {"score": lambda state: 1.0} if name == "greedy_soup" else {}
    models, k = ([bad], 0) if name == "nearswap" else ([good, bad], 1)
    base = {"base": {"w": torch.zeros(1, 2)}} if own and own.base == "needed" else {}
    with pytest.raises(SurgeryError, match=rf"'w' of model {k} \(from 0\) holds NaN or infinity"):
        method(models, **base, **more)
    if base:
        with pytest.raises(SurgeryError, match=r"'w' of the base holds NaN or infinity"):
            method([good] * len(models), base=bad, **more)


@pytest.mark.parametrize("name", [*merge.METHODS, "fisher", "regmean"])
def test_infinities_that_all_models_share_stay(name):
    """As those of the mask of an attention, which is a buffer: a method sees 0 there."""
    mask = torch.full((2, 2), -math.inf).triu(1)
    states = [{"w": mask + torch.tensor([[k], [0.0]])} for k in (1.0, 3.0, 0.0)]
    zeros = [{"w": state["w"].nan_to_num(neginf=0)} for state in states]
    own = merge.METHODS.get(name)
    method = own.function if own else getattr(merge, name)
    more = {"t": 0.3} if name == "nearswap" else {}
    more |= {"fishers": [{"w": torch.ones(2, 2)}] * 2} if name == "fisher" else {}
    more |= {"grams": [{"w": torch.eye(2)}] * 2} if name == "regmean" else {}
    needed = own is not None and own.base == "needed"

    def call(states):
        return method(states[: 1 if name == "nearswap" else 2], **more, **({"base": states[2]} if needed else {}))

    same(call(states), {"w": mask + call(zeros)["w"]})
    with pytest.raises(SurgeryError, match=r"'w' of .* holds NaN or infinity"):
        call([{"w": -states[0]["w"]}, *states[1:]])


def test_large_numbers_are_finite():
    largest = {"w": torch.full((64,), torch.finfo(torch.float32).max / 2)}
    same(merge.ties([largest, largest], base={"w": torch.zeros(64)}, density=1.0), largest)
    with pytest.raises(SurgeryError, match=r"'w' of model 0 \(from 0\) holds numbers too large for a direction"):
        merge.slerp([{"w": torch.full((2,), 1e200, dtype=torch.float64)}] * 2)


def test_a_model_that_is_not_finite_is_named_over_the_whole_model_as_well():
    good, bad = {"w": torch.ones(3)}, {"w": torch.tensor([1.0, math.nan, 2.0])}
    with pytest.raises(SurgeryError, match=r"'w' of model 1 \(from 0\) holds NaN"):
        merge.ties([good, bad], base=good, across="model")
