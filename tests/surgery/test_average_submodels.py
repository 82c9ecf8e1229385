import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import average as slow_average

import surgery
import surgery.plan.average as module
from surgery.plan import Source, Submodel, as_runs


@st.composite
def cases(draw):
    """A full model, K plans with several runs and sources, a state of each, weights and a fallback."""
    seed, k = draw(st.integers(0, 10**6)), draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(seed)
    base = draw(st.lists(st.lists(st.integers(1, 6), max_size=3), min_size=1, max_size=3))
    shapes = {f"{block}.{i}": tuple(shape) for i, shape in enumerate(base) for block in "abc"}  # three alike blocks
    integers = {name for name in shapes if name.endswith(".0")} if draw(st.booleans()) else set()
    plans = [_plan(draw, shapes, len(base)) for _ in range(k)]

    def values(name, shape):
        if name in integers:
            return torch.randint(-9, 9, shape, generator=generator)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    states = [{n: values(p.entries[n][0].name, s) for n, s in p.small_shapes.items()} for p in plans]
    fallback = {n: values(n, s) for n, s in shapes.items()}
    weights = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.5]), min_size=k, max_size=k))
    return states, plans, fallback, weights


def _plan(draw, shapes, tensors):
    """Of the blocks a, b, c some are left out; b may stand for c too."""
    entries, depth, graft = {}, draw(st.integers(1, 3)), draw(st.booleans())
    for i in range(tensors):
        shape = shapes[f"a.{i}"]
        index = tuple(
            None
            if draw(st.booleans())
            else as_runs(sorted(draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=size))))
            for size in shape
        )
        for block in "abc"[:depth]:
            entries[f"{block}.{i}"] = (Source(f"{block}.{i}", index),)
        if depth < 3 and graft:
            last = "abc"[depth - 1]
            entries[f"{last}.{i}"] += tuple(Source(f"{block}.{i}", index) for block in "abc"[depth:])
    return Submodel(entries, shapes)


def embedded(states, plans, fallback):
    pairs = [plan.embed(state, into=fallback) for state, plan in zip(states, plans)]
    return [full for full, _ in pairs], [mask for _, mask in pairs]


@settings(max_examples=50, deadline=None)
@given(cases(), st.sampled_from([1, 7, 1 << 18]), st.sampled_from([0, 2, 32]))
def test_it_equals_the_average_of_embedded_models(case, slab, regions):
    states, plans, fallback, weights = case
    full, masks = embedded(states, plans, fallback)
    before = surgery.stack(full)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SLAB", slab)
        patch.setattr(module, "_REGIONS", regions)
        got = surgery.average_submodels(states, plans, fallback=fallback, weights=weights)
    expected = surgery.average(before, weights=weights, mask=surgery.stack(masks), fallback=fallback)
    slow = slow_average(full, weights, masks, fallback)
    assert list(got) == list(fallback)
    for name, tensor in got.items():
        assert tensor.dtype == fallback[name].dtype
        assert tensor.shape == fallback[name].shape
        torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-12)
        if tensor.is_floating_point():
            torch.testing.assert_close(tensor, slow[name], rtol=1e-12, atol=1e-12)
    again, _ = embedded(states, plans, fallback)
    assert all(torch.equal(t, before[n]) for n, t in surgery.stack(again).items())  # inputs unchanged


@settings(max_examples=30, deadline=None)
@given(cases(), st.sampled_from([0.5, 0.95, 1.0]), st.sampled_from(["each", "blocks", "kinds"]), st.data())
def test_factors_and_scaled_means_equal_those_of_embedded_models(case, q, kind, data):
    states, plans, fallback, weights = case
    if data.draw(st.booleans()):  # a client of zeros has no norm
        states[0] = {n: torch.zeros_like(t) for n, t in states[0].items()}
    groups = None
    if kind == "blocks":  # the last one is in no group
        groups = [tuple(n for n in fallback if n[0] == block) for block in "ab"]
    elif kind == "kinds":  # a grafted tensor counts twice in one norm
        groups = [tuple(n for n in fallback if n.endswith(".0")), tuple(n for n in fallback if n.endswith(".1"))]
    got = surgery.plan.submodel_factors(states, plans, q=q, groups=groups, weights=weights)
    members = [k for k, weight in enumerate(weights) if weight]
    for factor in got.values():
        assert factor.dtype == torch.float64
        assert factor.shape == (len(states),)
        assert (factor[[k for k in range(len(states)) if k not in members]] == 1).all()
    if not members:
        return
    full, masks = embedded([states[k] for k in members], [plans[k] for k in members], fallback)
    mask = surgery.stack(masks)
    scaled, expected = surgery.match_norms(surgery.stack(full), mask=mask, q=q, groups=groups)
    assert not any(state[n].dtype == torch.int64 for state in states for n in state if n in got)
    for name in (n for n, tensor in fallback.items() if tensor.is_floating_point()):
        alone = expected.get(name, torch.ones(len(members), dtype=torch.float64))
        torch.testing.assert_close(got[name][members], alone, rtol=1e-9, atol=0)
    mean = surgery.average_submodels(states, plans, fallback=fallback, weights=weights, factors=got)
    slow = surgery.average(scaled, weights=[weights[k] for k in members], mask=mask, fallback=fallback)
    torch.testing.assert_close(mean, slow, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_plans_that_hold_everything_are_the_plain_average(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (30, 20), "b": (7,), "scale": ()}
    plan = Submodel({n: (Source(n, (None,) * len(s)),) for n, s in shapes.items()}, shapes)
    states = [{n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()} for _ in range(4)]
    weights = torch.tensor([3, 1, 0, 2])
    states[2] = {n: torch.full_like(t, torch.nan) for n, t in states[2].items()}  # weight 0: no part at all
    got = surgery.average_submodels(states, [plan] * 4, fallback=states[0], weights=weights)
    torch.testing.assert_close(got, surgery.average(surgery.stack(states), weights=weights))
    assert all(t.dtype == dtype for t in got.values())


def test_float64_accumulates_what_float32_loses_and_tiny_weights_beat_the_fallback():
    plan = Submodel({"w": (Source("w", (None,)),)}, {"w": (1,)})
    part = Submodel({"w": (Source("w", (((0, 1),),)),)}, {"w": (2,)})
    states = [{"w": torch.tensor([v])} for v in (1e8, 1.0, -1e8)]
    assert surgery.average_submodels(states, [plan] * 3, fallback=states[0], dtype=torch.float64)["w"] * 3 == 1.0
    whole = Submodel({"w": (Source("w", (((1, 2),),)),)}, {"w": (2,)})
    got = surgery.average_submodels(states[:2], [part, whole], fallback={"w": torch.zeros(2)}, weights=[1e-60, 1.0])[
        "w"
    ]
    torch.testing.assert_close(got, torch.tensor([1e8, 1.0]))


def test_nobody_with_weight_keeps_the_fallback_and_copies_it():
    plan = Submodel({"w": (Source("w", (((0, 1),),)),)}, {"w": (2,), "v": (1,)})
    fallback = {"w": torch.tensor([5.0, 6.0]), "v": torch.tensor([7.0])}
    got = surgery.average_submodels([{"w": torch.ones(1)}], [plan], fallback=fallback, weights=[0.0])
    assert all(torch.equal(got[n], t) and got[n].data_ptr() != t.data_ptr() for n, t in fallback.items())


def test_half_precision_strided_and_meta_states():
    shapes = {"w": (4, 6)}
    plan = Submodel({"w": (Source("w", (((0, 2),), ((1, 3), (4, 5)))),)}, shapes)
    states = [{"w": torch.randn(3, 2).T.to(torch.float16)} for _ in range(3)]
    fallback = {"w": torch.randn(6, 4).T.half()}
    got = surgery.average_submodels(states, [plan] * 3, fallback=fallback)["w"]
    full, masks = embedded(states, [plan] * 3, fallback)
    torch.testing.assert_close(
        got, surgery.average(surgery.stack(full), weights=None, mask=surgery.stack(masks), fallback=fallback)["w"]
    )
    meta = [{"w": s["w"].to("meta")} for s in states]
    assert surgery.average_submodels(meta, [plan] * 3, fallback={"w": fallback["w"].to("meta")})["w"].is_meta


def test_factors_scale_what_is_summed_and_not_what_it_is_divided_by():
    shapes = {"w": (3,), "steps": ()}
    plans = [
        Submodel({"w": (Source("w", (index,)),), "steps": (Source("steps", ()),)}, shapes)
        for index in (((0, 2),), None, ((0, 1),))
    ]
    states = [
        {"w": torch.tensor(v), "steps": torch.tensor(s)} for v, s in (([1.0, 2.0], 3), ([4.0, 5.0, 6.0], 4), ([9.0], 1))
    ]
    fallback = {"w": torch.zeros(3), "steps": torch.tensor(0)}
    factors = {"w": torch.tensor([0.5, 2.0, 7.0]), "steps": torch.tensor([9.0, 9.0, 9.0])}
    got = surgery.average_submodels(states, plans, fallback=fallback, weights=[3, 1, 0], factors=factors)
    torch.testing.assert_close(got["w"], torch.tensor([(1.5 + 8) / 4, (3 + 10) / 4, 12.0]))
    assert got["steps"] == 4
    plain = surgery.average_submodels(states, plans, fallback=fallback, weights=[3, 1, 0])
    torch.testing.assert_close(
        surgery.average_submodels(states, plans, fallback=fallback, weights=[3, 1, 0], factors={}), plain
    )


def test_one_thread_and_two_give_the_same_without_gradients():
    shapes = {f"w{i}": (40, i + 1) for i in range(5)}
    plan = Submodel({n: (Source(n, (((0, 20),), None)),) for n in shapes}, shapes)
    states = [{n: torch.randn(20, s[1], requires_grad=True) for n, s in shapes.items()} for _ in range(3)]
    fallback, before, means = {n: torch.zeros(s) for n, s in shapes.items()}, torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            means.append(surgery.average_submodels(states, [plan] * 3, fallback=fallback))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(t, means[1][n]) and not t.requires_grad for n, t in means[0].items())
    assert list(means[0]) == list(shapes)


PLAN = Submodel({"w": (Source("w", (((0, 1),),)),)}, {"w": (2,)})
OTHER = Submodel({"w": (Source("w", (((0, 1),),)),)}, {"w": (3,)})
STATE, FULL = {"w": torch.ones(1)}, {"w": torch.ones(2)}


@pytest.mark.parametrize(
    ("states", "plans", "options", "message"),
    [
        ([STATE], [PLAN, PLAN], {}, "1 states and 2 plans"),
        ([], [], {}, "0 states"),
        ([STATE, STATE], [PLAN, OTHER], {}, "plan 1 is of the full model"),
        ([STATE, FULL], [PLAN, PLAN], {}, r"shape \(1,\) in plan 1 and \(2,\) in state 1"),
        ([STATE], [PLAN], {"fallback": STATE}, "full model and"),
        ([STATE], [PLAN], {"fallback": {"w": torch.ones(2).long()}}, "torch.int64 in the fallback and torch.float32"),
        ([STATE], [PLAN], {"weights": [1, 2]}, "weights have shape"),
        ([STATE], [PLAN], {"weights": [[1]]}, "one for each client"),
        ([STATE], [PLAN], {"weights": [-1]}, "not negative"),
        ([STATE], [PLAN], {"dtype": torch.float16}, "torch.float32 or torch.float64"),
        ([STATE], [PLAN], {"factors": {"v": torch.ones(1)}}, "name 'v', but the full model has no such tensor"),
        ([STATE], [PLAN], {"factors": {"w": torch.ones(2)}}, "factors of 'w' have shape"),
        ([STATE], [PLAN], {"factors": {"w": torch.tensor([torch.nan])}}, "must be finite"),
    ],
)
def test_it_refuses(states, plans, options, message):
    with pytest.raises(surgery.SurgeryError, match=message):
        surgery.average_submodels(states, plans, **{"fallback": FULL, **options})
