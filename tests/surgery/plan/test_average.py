"""Means of submodels, weighted and trimmed, and factors for them: those of the embedded models."""

import math

import pytest
import torch
from drawn_plans import SIZES, draw_plan, few, seeds, values
from hypothesis import given
from hypothesis import strategies as st
from oracles import average as slow_average

import surgery
import surgery.plan.average as average_module
from surgery.plan import Plan, Source, submodel_factors


@st.composite
def cohorts(draw):
    """States of K small models, one of them perhaps of zeros, their plans, weights, and a fallback."""
    shapes = {f"{t}{i}": shape for i, shape in enumerate(draw(SIZES)) for t in "tu"}
    whole = draw(st.sets(st.sampled_from(sorted(set(shapes.values())))))
    integers = {name for name, shape in shapes.items() if shape in whole}  # what stands for another is of its kind
    plans = [draw_plan(draw, shapes) for _ in range(draw(st.integers(1, 4)))]
    weights = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.5]), min_size=len(plans), max_size=len(plans)))
    seed = draw(seeds)

    def typed(state, name_of=lambda name: name):
        return {n: t.long() if name_of(n) in integers else t / 7 for n, t in state.items()}

    states = [
        typed(values(plan.small_shapes, seed + k), lambda name, plan=plan: plan.entries[name][0].name)
        for k, plan in enumerate(plans)
    ]
    if draw(st.booleans()):
        states[0] = {name: torch.zeros_like(tensor) for name, tensor in states[0].items()}
    return states, plans, weights, typed(values(shapes, seed - 1))


def embedded(states, plans, fallback):
    full, masks = zip(*(plan.embed(state, into=fallback) for state, plan in zip(states, plans)))
    return surgery.stack(list(full)), surgery.stack(list(masks))


@few
@given(cohorts(), st.sampled_from([1, 7, 1 << 18]), st.sampled_from([0, 2, 32]), st.sampled_from([0.0, 0.3, 0.4, 0.5]))
def test_means_are_those_of_the_embedded_models(case, slab, regions, trim):
    states, plans, weights, fallback = case
    factors = {name: torch.arange(1.0, len(states) + 1) / 2 for name in [*fallback][::2]}
    models, mask = embedded(states, plans, fallback)
    scaled = {
        name: tensor * factors[name].view(-1, *[1] * (tensor.ndim - 1))
        if name in factors and tensor.is_floating_point()
        else tensor
        for name, tensor in models.items()
    }
    how = {"weights": weights, "mask": mask, "fallback": fallback}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(average_module, "_SLAB", slab)
        patch.setattr(average_module, "_REGIONS", regions)
        got = surgery.average_submodels(states, plans, weights=weights, factors=factors, fallback=fallback)
        plain = surgery.average_submodels(states, plans, weights=weights, fallback=fallback)
        trimmed = surgery.average_submodels(
            states, plans, weights=weights, factors=factors, fallback=fallback, trim=trim
        )
    slow = slow_average(surgery.unstack(models), weights, surgery.unstack(mask), fallback)
    slow = {name: tensor for name, tensor in slow.items() if fallback[name].is_floating_point()}
    for mean, expected in (
        (got, surgery.average(scaled, **how)),
        (plain, {**surgery.average(models, **how), **slow}),
        (trimmed, surgery.trimmed_mean(scaled, trim=trim, **how)),
    ):
        assert list(mean) == list(fallback)
        for name, tensor in mean.items():
            assert (tensor.dtype, tensor.shape) == (fallback[name].dtype, fallback[name].shape)
            assert not tensor.numel() or tensor.data_ptr() != fallback[name].data_ptr()
            torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-12)
    assert all(torch.equal(t, models[n]) for n, t in embedded(states, plans, fallback)[0].items())  # inputs unchanged


@few
@given(cohorts(), st.sampled_from([0.5, 0.8, 1.0]), st.sampled_from(["each", "some", "kinds"]))
def test_factors_and_scaled_means_are_those_of_the_embedded_models(case, q, kind):
    states, plans, weights, fallback = case
    groups = None
    if kind == "some":  # the last one is in no group
        groups = [(name,) for name in [*fallback][:-1]]
    elif kind == "kinds":  # a tensor that stands for another counts twice in one norm
        groups = [tuple(name for name in fallback if name[1:] == i) for i in {name[1:] for name in fallback}]
    got = submodel_factors(states, plans, q=q, groups=groups, weights=weights)
    members = [k for k, weight in enumerate(weights) if weight]
    for factor in got.values():
        assert (factor.dtype, factor.shape) == (torch.float64, (len(states),))
        assert all(factor[k] == 1 for k in range(len(states)) if k not in members)
    if not members:
        return
    models, mask = embedded([states[k] for k in members], [plans[k] for k in members], fallback)
    scaled, expected = surgery.match_norms(models, mask=mask, q=q, groups=groups)
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
    plan = Plan({n: (Source(n, (None,) * len(s)),) for n, s in shapes.items()}, shapes)
    states = [{n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()} for _ in range(4)]
    weights = torch.tensor([3, 1, 0, 2])
    states[2] = {n: torch.full_like(t, torch.nan) for n, t in states[2].items()}  # weight 0: no part at all
    got = surgery.average_submodels(states, [plan] * 4, fallback=states[0], weights=weights)
    torch.testing.assert_close(got, surgery.average(surgery.stack(states), weights=weights))
    assert all(t.dtype == dtype for t in got.values())


def test_float64_accumulates_what_float32_loses_and_tiny_weights_beat_the_fallback():
    plan = Plan({"w": (Source("w", (None,)),)}, {"w": (1,)})
    part = Plan({"w": (Source("w", (((0, 1),),)),)}, {"w": (2,)})
    states = [{"w": torch.tensor([v])} for v in (1e8, 1.0, -1e8)]
    assert surgery.average_submodels(states, [plan] * 3, fallback=states[0], dtype=torch.float64)["w"] * 3 == 1.0
    whole = Plan({"w": (Source("w", (((1, 2),),)),)}, {"w": (2,)})
    got = surgery.average_submodels(states[:2], [part, whole], fallback={"w": torch.zeros(2)}, weights=[1e-60, 1.0])[
        "w"
    ]
    torch.testing.assert_close(got, torch.tensor([1e8, 1.0]))


def test_half_precision_strided_and_meta_states():
    shapes = {"w": (4, 6)}
    plan = Plan({"w": (Source("w", (((0, 2),), ((1, 3), (4, 5)))),)}, shapes)
    states = [{"w": torch.randn(3, 2).T.to(torch.float16)} for _ in range(3)]
    fallback = {"w": torch.randn(6, 4).T.half()}
    got = surgery.average_submodels(states, [plan] * 3, fallback=fallback)["w"]
    models, mask = embedded(states, [plan] * 3, fallback)
    torch.testing.assert_close(got, surgery.average(models, mask=mask, fallback=fallback)["w"])
    meta = [{"w": s["w"].to("meta")} for s in states]
    assert surgery.average_submodels(meta, [plan] * 3, fallback={"w": fallback["w"].to("meta")})["w"].is_meta


def test_one_thread_and_two_give_the_same_without_gradients():
    shapes = {f"w{i}": (40, i + 1) for i in range(5)}
    plan = Plan({n: (Source(n, (((0, 20),), None)),) for n in shapes}, shapes)
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


PLAN = Plan({"w": (Source("w", (((0, 1),),)),)}, {"w": (2,)})
OTHER = Plan({"w": (Source("w", (((0, 1),),)),)}, {"w": (3,)})
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
        ([STATE], [PLAN], {"trim": 0.6}, r"in \[0, 0.5\].*got 0.6"),
        ([STATE], [PLAN], {"trim": 0.1, "weights": [0], "fallback": STATE}, "full model and"),
        ([STATE], [PLAN], {"trim": True, "weights": [0]}, "got True"),
        ([STATE], [PLAN], {"trim": 0.1, "dtype": torch.float64}, "give one"),
        (
            [{"w": torch.ones(1) * 1j}],
            [PLAN],
            {"trim": 0.1, "fallback": {"w": torch.ones(2) * 1j}},
            "cannot be trimmed",
        ),
        ([STATE], [PLAN], {"dtype": torch.float16}, "torch.float32 or torch.float64"),
        ([STATE], [PLAN], {"factors": {"v": torch.ones(1)}}, "name 'v', but the full model has no such tensor"),
        ([STATE], [PLAN], {"factors": {"w": torch.ones(2)}}, "factors of 'w' have shape"),
        ([STATE], [PLAN], {"factors": {"w": torch.tensor([torch.nan])}}, "must be finite"),
    ],
)
def test_it_refuses(states, plans, options, message):
    with pytest.raises(surgery.SurgeryError, match=message):
        surgery.average_submodels(states, plans, **{"fallback": FULL, **options})


WIDE = Plan({"w": (Source("w", (None,)),)}, {"w": (64,)})
NARROW = Plan({"w": (Source("w", (((0, 16),),)),)}, {"w": (64,)})
PAIR = [{"w": torch.full((16,), 3.0)}, {"w": torch.full((64,), -3.0)}]


def test_rms_does_not_scale_a_model_for_being_narrow():
    assert submodel_factors(PAIR, [NARROW, WIDE])["w"].tolist() == pytest.approx([1.5, 0.75])
    assert submodel_factors(PAIR, [NARROW, WIDE], measure="rms")["w"].tolist() == pytest.approx([1.0, 1.0])
    # 100 stands above the quantile: it counts neither in the norm nor in the number.
    states = [{"w": torch.tensor([2.0] * 15 + [100.0])}, {"w": torch.full((64,), 1.0)}]
    assert submodel_factors(states, [NARROW, WIDE], measure="rms")["w"].tolist() == pytest.approx([0.75, 1.5])


def test_who_has_no_weight_may_hold_anything_and_meta_tensors_have_factor_one():
    states = [{"w": torch.full((16,), math.nan)}, PAIR[1]]
    assert submodel_factors(states, [NARROW, WIDE], weights=[0, 3])["w"].tolist() == [1.0, 1.0]
    meta = [{"w": s["w"].to("meta")} for s in PAIR]
    assert submodel_factors(meta, [NARROW, WIDE])["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"measure": "max"}, "choose norm or rms"),
        ({"q": 2.0}, "q must be a quantile"),
        ({"groups": [("v",)]}, "'v', but the full model has no such tensor"),
        ({"groups": [("w",), ("w",)]}, "in two groups"),
        ({"weights": [1, 2, 3]}, "weights have shape"),
        ({"plans": [WIDE]}, "2 states and 1 plans"),
        ({"plans": [WIDE, WIDE]}, r"plan 0 and \(16,\) in state 0"),
        ({"states": [PAIR[0], {"w": torch.full((64,), math.inf)}]}, "w of state 1 hold NaN or infinity"),
    ],
)
def test_factors_refuse(arguments, message):
    with pytest.raises(surgery.SurgeryError, match=message):
        submodel_factors(**{"states": PAIR, "plans": [NARROW, WIDE], **arguments})


@pytest.mark.gpu
def test_cuda_gives_what_the_cpu_gives():
    there, old = [{n: t.cuda() for n, t in state.items()} for state in PAIR], {"w": torch.zeros(64)}
    factors, expected = submodel_factors(there, [NARROW, WIDE]), submodel_factors(PAIR, [NARROW, WIDE])
    torch.testing.assert_close(factors, expected, rtol=1e-6, atol=0)
    mean = surgery.average_submodels(there, [NARROW, WIDE], fallback={"w": old["w"].cuda()}, factors=factors)
    slow = surgery.average_submodels(PAIR, [NARROW, WIDE], fallback=old, factors=expected)
    torch.testing.assert_close(mean["w"].cpu(), slow["w"], rtol=1e-5, atol=1e-6)


def test_masks_of_pruning_are_not_averaged():
    full = {"w_mask": (3,), "w_orig": (3,)}
    plans = [Plan({name: (Source(name, (((0, n),),)),) for name in full}, full) for n in (2, 3)]
    states = [{"w_mask": torch.tensor([1.0, 0.0, 1.0][:n]), "w_orig": torch.full((n,), float(n))} for n in (2, 3)]
    fallback = {name: torch.zeros(3) for name in full}
    factors = {"w_mask": torch.tensor([0.5, 2.0])}
    for trim in (None, 0.0):
        given = {"fallback": fallback, "factors": factors, "trim": trim}
        mean = surgery.average_submodels(states, plans, **given)
        assert mean["w_mask"].tolist() == [1, 0, 1]
        assert mean["w_orig"].tolist() == [2.5, 2.5, 3]
        states[0]["w_mask"][0] = 0
        with pytest.raises(surgery.SurgeryError):
            surgery.average_submodels(states, plans, **given)
        assert surgery.average_submodels(states, plans, weights=[0, 1], **given)["w_mask"].tolist() == [1, 0, 1]
        states[0]["w_mask"][0] = 1
