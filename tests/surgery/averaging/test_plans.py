"""Means of models of different sizes, and factors for them: those of the embedded models."""

import itertools
from functools import partial, reduce
from operator import add

import pytest
import torch
from drawn_plans import cohorts, embedded, few
from hypothesis import given
from hypothesis import strategies as st
from oracles import average as slow_average
from refusals import refused

import surgery
import surgery.averaging.plans as plans_module
from fl.extensions.trimmed import trimmed_mean
from surgery.plan import Plan, Source
from surgery.scale import norm_factors


@few
@given(cohorts(), st.sampled_from([1, 7, 1 << 18]), st.sampled_from([0, 2, 32]))
def test_plans__means_are_those_of_the_embedded_models(case, slab, regions):
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
        patch.setattr(plans_module, "_SLAB", slab)
        patch.setattr(plans_module, "_REGIONS", regions)
        got = surgery.average(states, plans, weights=weights, factors=factors, fallback=fallback)
        plain = surgery.average(states, plans, weights=weights, fallback=fallback)
    slow = slow_average(surgery.unstack(models), weights, surgery.unstack(mask), fallback)
    slow = {name: tensor for name, tensor in slow.items() if fallback[name].is_floating_point()}
    for mean, expected in ((got, surgery.average(scaled, **how)), (plain, {**surgery.average(models, **how), **slow})):
        assert list(mean) == list(fallback)
        for name, tensor in mean.items():
            assert (tensor.dtype, tensor.shape) == (fallback[name].dtype, fallback[name].shape)
            assert not tensor.numel() or tensor.data_ptr() != fallback[name].data_ptr()
            torch.testing.assert_close(tensor, expected[name], rtol=1e-12, atol=1e-12)
    assert all(torch.equal(t, models[n]) for n, t in embedded(states, plans, fallback)[0].items())  # inputs unchanged


@few
@given(cohorts())
def test_match_norms__models_scaled_by_plans_average_as_with_factors(case):
    """But where a tensor stands for several that have different factors: no one model is scaled by all of them."""
    states, plans, weights, fallback = case
    before = [{name: tensor.clone() for name, tensor in state.items()} for state in states]
    expected = norm_factors(states, plans)
    torn = any(
        len({expected[s.name][k].item() if s.name in expected else 1 for s in sources}) > 1
        for k, plan in enumerate(plans)
        for sources in plan.entries.values()
    )
    if torn:
        with refused("ambiguous"):
            surgery.match_norms(states, plans)
        return
    scaled, factors = surgery.match_norms(states, plans)
    assert all(torch.equal(expected[name], factor) for name, factor in factors.items())
    assert factors.keys() == expected.keys()
    for old, state, new in zip(before, states, scaled):
        for name, tensor in state.items():
            assert torch.equal(old[name], tensor)
            assert (new[name].dtype, new[name].shape) == (tensor.dtype, tensor.shape)
            assert not tensor.numel() or new[name].data_ptr() != tensor.data_ptr()
    mean = surgery.average(scaled, plans, weights, fallback)
    torch.testing.assert_close(mean, surgery.average(states, plans, weights, fallback, factors=factors))


@few
@given(cohorts(), st.sampled_from([0.5, 0.8, 1.0]), st.sampled_from(["each", "some", "kinds"]))
def test_match_norms__factors_and_scaled_means_are_those_of_the_embedded_models(case, q, kind):
    states, plans, weights, fallback = case
    groups = None
    if kind == "some":  # the last one is in no group
        groups = [(name,) for name in [*fallback][:-1]]
    elif kind == "kinds":  # a tensor that stands for another counts twice in one norm
        groups = [tuple(name for name in fallback if name[1:] == i) for i in {name[1:] for name in fallback}]
    got = norm_factors(states, plans, q=q, groups=groups, weights=weights)
    members = [k for k, weight in enumerate(weights) if weight]
    for factor in got.values():
        assert (factor.dtype, factor.shape) == (torch.float64, (len(states),))
        assert all(factor[k] == 1 for k in range(len(states)) if k not in members)
    if not members:
        return
    models, mask = embedded([states[k] for k in members], [plans[k] for k in members], fallback)
    scaled, expected = surgery.match_norms(models, mask=mask, q=q, groups=groups)
    for name, alone in expected.items():
        torch.testing.assert_close(got[name][members], alone, rtol=1e-9, atol=0)
    mean = surgery.average(states, plans, fallback=fallback, weights=weights, factors=got)
    slow = surgery.average(scaled, weights=[weights[k] for k in members], mask=mask, fallback=fallback)
    torch.testing.assert_close(mean, slow, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_plans__that_hold_everything_are_the_plain_average(dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (30, 20), "b": (7,), "scale": ()}
    plan = Plan({n: (Source(n, (None,) * len(s)),) for n, s in shapes.items()}, shapes)
    states = [{n: torch.randn(s, generator=generator).to(dtype) for n, s in shapes.items()} for _ in range(4)]
    weights = torch.tensor([3, 1, 0, 2])
    states[2] = {n: torch.full_like(t, torch.nan) for n, t in states[2].items()}  # weight 0: no part at all
    got = surgery.average(states, [plan] * 4, fallback=states[0], weights=weights)
    torch.testing.assert_close(got, surgery.average(surgery.stack(states), weights=weights))
    assert all(t.dtype == dtype for t in got.values())


def test_plans__tiny_weights_beat_the_fallback():
    part = Plan({"w": (Source("w", (((0, 1),),)),)}, {"w": (2,)})
    states = [{"w": torch.tensor([v])} for v in (1e8, 1.0)]
    whole = Plan({"w": (Source("w", (((1, 2),),)),)}, {"w": (2,)})
    got = surgery.average(states, [part, whole], fallback={"w": torch.zeros(2)}, weights=[1e-60, 1.0])
    torch.testing.assert_close(got["w"], torch.tensor([1e8, 1.0]))


def test_plans__half_precision_strided_and_meta_states():
    shapes = {"w": (4, 6)}
    plan = Plan({"w": (Source("w", (((0, 2),), ((1, 3), (4, 5)))),)}, shapes)
    states = [{"w": torch.randn(3, 2).T.to(torch.float16)} for _ in range(3)]
    fallback = {"w": torch.randn(6, 4).T.half()}
    got = surgery.average(states, [plan] * 3, fallback=fallback)["w"]
    models, mask = embedded(states, [plan] * 3, fallback)
    torch.testing.assert_close(got, surgery.average(models, mask=mask, fallback=fallback)["w"])
    meta = [{"w": s["w"].to("meta")} for s in states]
    assert surgery.average(meta, [plan] * 3, fallback={"w": fallback["w"].to("meta")})["w"].is_meta


def test_plans__one_thread_and_two_give_the_same_without_gradients():
    shapes = {f"w{i}": (40, i + 1) for i in range(5)}
    plan = Plan({n: (Source(n, (((0, 20),), None)),) for n in shapes}, shapes)
    states = [{n: torch.randn(20, s[1], requires_grad=True) for n, s in shapes.items()} for _ in range(3)]
    fallback, before, means = {n: torch.zeros(s) for n, s in shapes.items()}, torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            means.append(surgery.average(states, [plan] * 3, fallback=fallback))
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(t, means[1][n]) and not t.requires_grad for n, t in means[0].items())
    assert list(means[0]) == list(shapes)


PLAN = Plan({"w": (Source("w", (((0, 1),),)),)}, {"w": (2,)})
OTHER = Plan({"w": (Source("w", (((0, 1),),)),)}, {"w": (3,)})
STATE, FULL = {"w": torch.ones(1)}, {"w": torch.ones(2)}


@pytest.mark.parametrize(
    ("states", "plans", "options", "expected"),
    [
        ([STATE], [PLAN, PLAN], {}, "argument"),
        ([], [], {}, "argument"),
        ([STATE, STATE], [PLAN, OTHER], {}, "mismatch"),
        ([STATE, FULL], [PLAN, PLAN], {}, "mismatch"),
        ([STATE], [PLAN], {"fallback": STATE}, "mismatch"),
        ([STATE], [PLAN], {"fallback": {"w": torch.ones(2).long()}}, "mismatch"),
        ([STATE], [PLAN], {"fallback": None}, "argument: `fallback`"),
        ([STATE], [PLAN], {"mask": [{"w": torch.ones(1) > 0}]}, "argument"),
        ([STATE], None, {"factors": {"w": [2.0]}}, "argument"),
        ([STATE], [3], {}, "argument"),
        ([STATE], [PLAN], {"weights": [1, 2]}, "argument"),
        ([STATE], [PLAN], {"weights": [[1]]}, "argument"),
        ([STATE], [PLAN], {"weights": [-1]}, "argument"),
        ([STATE], [PLAN], {"factors": {"v": torch.ones(1)}}, "name: 'v'"),
        ([STATE], [PLAN], {"factors": {"w": torch.ones(2)}}, "argument: 'w'"),
        ([STATE], [PLAN], {"factors": {"w": torch.tensor([torch.nan])}}, "argument"),
    ],
)
def test_plans__it_refuses(states, plans, options, expected):
    with refused(expected):
        surgery.average(states, plans, **{"fallback": FULL, **options})


def test_plans__masks_of_pruning_are_not_averaged():
    full = {"w_mask": (3,), "w_orig": (3,)}
    plans = [Plan({name: (Source(name, (((0, n),),)),) for name in full}, full) for n in (2, 3)]
    states = [{"w_mask": torch.tensor([1.0, 0.0, 1.0][:n]), "w_orig": torch.full((n,), float(n))} for n in (2, 3)]
    fallback = {name: torch.zeros(3) for name in full}
    factors = {"w_mask": torch.tensor([0.5, 2.0])}
    given = {"fallback": fallback, "factors": factors}
    for mean in (surgery.average, partial(trimmed_mean, trim=0)):
        result = mean(states, plans, **given)
        assert result["w_mask"].tolist() == [1, 0, 1]
        assert result["w_orig"].tolist() == [2.5, 2.5, 3]
        states[0]["w_mask"][0] = 0
        with refused("mismatch"):
            mean(states, plans, **given)
        assert mean(states, plans, weights=[0, 1], **given)["w_mask"].tolist() == [1, 0, 1]
        states[0]["w_mask"][0] = 1


@pytest.mark.parametrize(("kind", "other"), [(torch.uint8, torch.int64), (torch.int32, torch.uint8), (torch.bool,) * 2])
def test_plans__integers_are_the_maximum_of_what_states_hold(kind, other):
    """Compared before they are brought to the fallback's dtype, and whatever the factors."""
    plans = [Plan({"n": (Source("n", (((0, n),),)),)}, {"n": (3,)}) for n in (1, 2)]
    states = [{"n": torch.tensor(values).to(other)} for values in ([1], [0, 1])]
    fallback = {"n": torch.tensor([7, 8, 9]).to(kind)}
    mean = surgery.average(states, plans, [1, 5], fallback, factors={"n": [0.5, 3]})["n"]
    assert mean.dtype == kind
    assert mean.tolist() == [1, 1, 9 if kind != torch.bool else True]


def test_plans__a_stack_of_models_has_plans_as_a_list_has():
    states = [{"w": torch.full((1,), float(k))} for k in range(3)]
    mean = surgery.average(surgery.stack(states), [PLAN] * 3, fallback=FULL)
    assert torch.equal(mean["w"], surgery.average(states, [PLAN] * 3, fallback=FULL)["w"])


def test_plans__weights_are_summed_in_the_order_of_the_models():
    """Not in that of a set of indices, which differs from process to process."""
    indices = [((None, ((0, n),)), 0.1 * n) for n in range(1, 6)]
    for order in itertools.islice(itertools.permutations(indices), 0, None, 5):
        parts = [plans_module._ClientPart(0, share, 1.0, torch.zeros(1), index) for index, share in order]
        expected = reduce(add, (share for _, share in order))  # `sum` rounds otherwise from Python 3.12 on
        assert plans_module._Mass((1, 6), parts).cells[0, 0].item() == expected
