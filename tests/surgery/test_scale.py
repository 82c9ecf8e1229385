import math

import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

import surgery
import surgery.scale as module
from surgery.plan import Plan, Source
from surgery.scale import norm_factors

QUANTILES = st.sampled_from([0.0, 0.1, 0.29, 0.5, 0.75, 0.95, 1.0])


@st.composite
def stacks(draw):
    """A stack of K random models, some zero, with ties in magnitude, and a mask."""
    k, seed = draw(st.integers(1, 4)), draw(st.integers(0, 10**6))
    generator = torch.Generator().manual_seed(seed)
    shapes = draw(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4))
    coarse = draw(st.booleans())
    models = {f"w{i}": torch.randn(k, *shape, generator=generator) for i, shape in enumerate(shapes)}
    if coarse:
        models = {n: t.round() for n, t in models.items()}
    mask = {n: torch.rand(t.shape, generator=generator) < 0.6 for n, t in models.items()}
    return models, mask if draw(st.booleans()) else None


@settings(max_examples=60)
@given(st.integers(0, 120), QUANTILES, st.booleans(), st.integers(0, 10**6))
def test_scale__percentile_norm_equals_the_sorted_list(n, q, ties, seed):
    values = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    values = values.mul(2).round() if ties else values
    expected = torch.tensor(oracles.percentile_norm(values.tolist(), q))
    torch.testing.assert_close(surgery.scale.percentile_norm(values, q=q), expected, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_scale__percentile_norm_has_no_limit_of_elements_and_sums_exactly():
    n = (1 << 24) + 21  # torch.quantile refuses this many
    values = torch.ones(n)
    values[:1000] = 50.0
    norm = surgery.scale.percentile_norm(values, q=0.95)
    assert norm.item() == pytest.approx(math.sqrt(n - 1000), rel=1e-7)  # float32 sums of squares stop at 2^24


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64])
def test_scale__dtypes_are_computed_in_float32_at_least(dtype):
    x = torch.full((3, 100), 200.0).to(dtype)  # squares overflow in float16
    norms = surgery.scale.percentile_norm(x, stacked=True)
    assert norms.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
    assert norms.shape == (3,)
    assert norms.tolist() == pytest.approx([2000.0] * 3, rel=1e-2)
    scaled, factors = surgery.match_norms({"w": x})
    assert scaled["w"].dtype == dtype
    assert factors["w"].tolist() == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("large", [0, 1 << 16])  # each is searched, or many are put together
@settings(max_examples=40)
@given(case=stacks(), q=QUANTILES, together=st.booleans())
def test_scale__match_norms_equals_the_paper_s_loop(large, case, q, together):
    models, mask = case
    names = list(models)
    groups = [tuple(names[::2]), tuple(names[1::2])] if together else [(n,) for n in names]
    before = {n: t.clone() for n, t in models.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_LARGE", large)
        scaled, factors = surgery.match_norms(models, mask=mask, q=q, groups=groups if together else None)
    masks = None if mask is None else surgery.unstack(mask)
    for group, expected in zip(groups, oracles.match_norms(surgery.unstack(models), groups, q, masks)):
        for name in group:
            torch.testing.assert_close(factors[name], torch.tensor(expected), rtol=1e-5, atol=0)
            for k, alpha in enumerate(expected):
                torch.testing.assert_close(scaled[name][k], before[name][k] * alpha, rtol=1e-5, atol=0)
            assert torch.equal(models[name], before[name])


def test_scale__uncovered_elements_zeros_integers_and_ungrouped_tensors():
    models = {
        "w": torch.tensor([[3.0, math.nan], [6.0, 8.0], [0.0, 0.0]]),
        "v": torch.ones(3, 2),
        "steps": torch.tensor([1, 2, 3]),
    }
    mask = {"w": torch.tensor([[True, False], [True, True], [True, True]])}
    scaled, factors = surgery.match_norms(models, mask=mask, q=1.0, groups=[("w", "steps")])
    assert factors.keys() == {"w"}
    assert factors["w"].tolist() == pytest.approx([6.5 / 3, 0.65, 1.0])
    assert list(scaled) == list(models)
    for name in ("v", "steps"):
        assert torch.equal(scaled[name], models[name])
        assert scaled[name].data_ptr() != models[name].data_ptr()


def test_scale__meta_tensors_give_shapes():
    models = {"w": torch.zeros(3, 2, device="meta")}
    assert surgery.scale.percentile_norm(models["w"], stacked=True).shape == (3,)
    scaled, factors = surgery.match_norms(models)
    assert scaled["w"].is_meta
    assert factors["w"].is_meta
    assert scaled["w"].shape == (3, 2)


def test_scale__the_accelerator_s_way_gives_the_same():
    """What other devices run (no NumPy), on tensors whose device only claims to be another."""
    values = torch.randn(3, 101, generator=torch.Generator().manual_seed(0)).abs()

    class Elsewhere(torch.Tensor):
        device = torch.device("meta")

    for q in (0.0, 0.5, 0.95, 1.0):
        here = module._lowest(values.clone(), q)
        there = module._lowest(values.clone().as_subclass(Elsewhere), q).as_subclass(torch.Tensor)
        torch.testing.assert_close(there, here)
        assert here[:, 1].tolist() == [int(100 * q) + 1] * 3


def adversaries():
    """Name: tensors of one norm. All are large enough to be searched in several chunks."""
    generator = torch.Generator().manual_seed(0)
    n = 9 * 8 * 40
    normal = torch.randn(n, generator=generator)
    outlier, sparse, two = normal.clone(), torch.zeros(n), torch.ones(n)
    outlier[777] = -1e12
    sparse[::19] = normal[::19]
    two[: n // 2] = -3.0
    periodic = normal * torch.tensor([9.0, 1, 1, 1, 1, 1, 1, 1]).repeat(n // 8)
    return {
        "normal": [normal],
        "several": [normal[:7], normal[7:2002].reshape(3, -1), normal[2002:] * 3],
        "sorted": [normal.sort().values],
        "ties": [normal.round()],
        "constant": [torch.full((n,), -0.1)],
        "zeros": [torch.zeros(n)],
        "sparse": [sparse],
        "two values": [two],
        "an outlier": [outlier],
        "all but few are tiny": [normal * 1e-6, normal[:200] * 1e6],
        "squares underflow": [normal * 1e-25],
        "squares overflow": [normal * 1e30],
        "periodic": [periodic],
        "transposed": [normal.view(60, -1).T],
        "strided": [normal[::3], normal[5::2]],
        "channels_last": [normal.view(40, 8, 3, 3).to(memory_format=torch.channels_last)],
        "expanded": [normal[:40, None].expand(40, 50)],
        "half": [normal.half(), normal],
        "bfloat16": [normal.bfloat16()],
        "double": [normal.double() * 1e100],
        "complex": [torch.complex(normal, -normal)],
    }


@pytest.mark.parametrize("name", adversaries())
@pytest.mark.parametrize("q", [0.0, 0.29, 0.95, 1.0])
def test_scale__searching_a_large_tensor_equals_the_sorted_list(name, q, monkeypatch):
    tensors = adversaries()[name]
    monkeypatch.setattr(module, "_CHUNK", 1024)
    monkeypatch.setattr(module, "_ROW", 128)
    before = [tensor.clone() for tensor in tensors]
    norm, counted = module._search(tensors, q)[0].tolist()
    sizes = [abs(v) for tensor in tensors for v in tensor.reshape(-1).abs().double().tolist()]
    assert norm == pytest.approx(oracles.percentile_norm(sizes, q), rel=1e-6)
    threshold = sorted(sizes)[module._rank(len(sizes), q)]
    assert counted == sum(size <= threshold for size in sizes)
    assert all(map(torch.equal, tensors, before))


@pytest.mark.parametrize("q", [0.07, 0.14, 0.29, 0.57, 0.58])  # of which 100 times is less in floating point
def test_scale__a_percentile_of_101_magnitudes_is_the_one_of_that_number(q):
    expected = math.sqrt(sum(i * i for i in range(round(100 * q) + 1)))
    assert surgery.scale.percentile_norm(torch.arange(101.0), q=q).item() == pytest.approx(expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("at", [0, 1, 2879])
def test_scale__searching_finds_what_is_not_finite(bad, at):
    values = adversaries()["normal"][0]
    values[at] = bad
    assert module._search([values], 0.95)[0, 0].isnan()


def test_scale__ordinary_weights_are_searched_without_sorting_them(monkeypatch):
    monkeypatch.setattr(module, "_lowest", lambda *_: pytest.fail("sorted out"))
    values = torch.randn(2, 750, 750, generator=torch.Generator().manual_seed(0))
    norms = surgery.scale.percentile_norm(values, stacked=True)
    for value, norm in zip(values, norms):
        size = value.abs().flatten()
        kept = size[size <= size.kthvalue(math.floor(0.95 * (size.numel() - 1)) + 1).values]
        assert norm.item() == pytest.approx(kept.double().norm().item(), rel=1e-6)


@pytest.mark.parametrize("threads", [1, 2])
def test_scale__norms_of_all_sizes_come_back_in_order(threads):
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        sizes = [5, 90_000, 1, 70_000, 0, 5, 130_000, 40_000]
        jobs = [[torch.full((size,), float(j))] for j, size in enumerate(sizes)]
        found = module.joint_norms(jobs, 0.95)
        assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert found[:, 0].tolist() == pytest.approx([j * math.sqrt(size) for j, size in enumerate(sizes)], rel=1e-7)
    assert found[:, 1].tolist() == sizes


def test_scale__next_to_nothing_is_not_enlarged():
    scaled, factors = surgery.match_norms({"w": torch.tensor([[1e-42], [1.0], [3.0], [1e-5]])}, q=1.0)
    torch.testing.assert_close(factors["w"], torch.tensor([1.0, 4 / 3, 4 / 9, 4e5 / 3]), rtol=1e-5, atol=0)
    assert scaled["w"][0] == torch.tensor(1e-42)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"models": {"w": torch.tensor([[1.0, math.inf], [1.0, 1.0]])}}, "values"),
        ({"models": {"w": torch.tensor([[1.0, 1.0], [math.nan, 1.0]])}}, "values"),
        ({"models": {"w": torch.ones(2, 2)}, "q": -0.1}, "argument: q"),
        ({"q": math.nan}, "argument: q"),
        ({"groups": [("u",)]}, "name: 'u'"),
        ({"groups": [("w",), ("w",)]}, "argument"),
        ({"mask": {"w": torch.ones(2, 3, dtype=torch.bool)}}, "mismatch"),
        ({"mask": {"w": torch.ones(2, 2)}}, "argument: masks"),
    ],
)
def test_scale__match_norms_refuses(arguments, expected):
    with refused(expected):
        surgery.match_norms(**{"models": {"w": torch.ones(2, 2)}, **arguments})


WIDE = Plan({"w": (Source("w", (None,)),)}, {"w": (64,)})
NARROW = Plan({"w": (Source("w", (((0, 16),),)),)}, {"w": (64,)})
PAIR = [{"w": torch.full((16,), 3.0)}, {"w": torch.full((64,), -3.0)}]


def test_scale__rms_does_not_scale_a_model_for_being_narrow():
    assert norm_factors(PAIR, [NARROW, WIDE])["w"].tolist() == pytest.approx([1.5, 0.75])
    assert norm_factors(PAIR, [NARROW, WIDE], measure="rms")["w"].tolist() == pytest.approx([1.0, 1.0])
    # 100 stands above the quantile: it counts neither in the norm nor in the number.
    states = [{"w": torch.tensor([2.0] * 15 + [100.0])}, {"w": torch.full((64,), 1.0)}]
    assert norm_factors(states, [NARROW, WIDE], measure="rms")["w"].tolist() == pytest.approx([0.75, 1.5])


def test_scale__who_has_no_weight_may_hold_anything_and_meta_tensors_have_factor_one():
    states = [{"w": torch.full((16,), math.nan)}, PAIR[1]]
    assert norm_factors(states, [NARROW, WIDE], weights=[0, 3])["w"].tolist() == [1.0, 1.0]
    meta = [{"w": s["w"].to("meta")} for s in PAIR]
    assert norm_factors(meta, [NARROW, WIDE])["w"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"measure": "max"}, "argument"),
        ({"q": 2.0}, "argument: q"),
        ({"groups": [("v",)]}, "name: 'v'"),
        ({"groups": [("w",), ("w",)]}, "argument"),
        ({"weights": [1, 2, 3]}, "argument"),
        ({"plans": [WIDE]}, "argument"),
        ({"plans": [WIDE, WIDE]}, "mismatch"),
        ({"models": [PAIR[0], {"w": torch.full((64,), math.inf)}]}, "values"),
    ],
)
def test_scale__factors_with_plans_refuse(arguments, expected):
    with refused(expected):
        norm_factors(**{"models": PAIR, "plans": [NARROW, WIDE], **arguments})


def test_scale__factors_of_a_stack_ignore_models_without_weight_and_know_rms():
    models = {"w": torch.tensor([[3.0, 4.0], [6.0, 8.0], [math.nan, 0.0]])}
    factors = norm_factors(models, q=1.0, weights=[2, 7, 0])["w"]
    torch.testing.assert_close(factors, torch.tensor([1.5, 0.75, 1.0], dtype=torch.float64))
    mask = {"w": torch.tensor([[True, False], [True, True], [False, False]])}
    factors = norm_factors(models, q=1.0, weights=[2, 7, 0], mask=mask, measure="rms")["w"]
    rms = torch.tensor([3.0, 50**0.5], dtype=torch.float64)
    torch.testing.assert_close(factors[:2], rms.mean() / rms)


def test_scale__a_block_that_stands_for_several_cannot_have_two_factors():
    full = {"a": (4,), "b": (4,)}
    deep = Plan({name: (Source(name, (None,)),) for name in full}, full)
    grafted = Plan({"a": (Source("a", (None,)), Source("b", (None,)))}, full)
    states = [{"a": torch.full((4,), 3.0), "b": torch.full((4,), 5.0)}, {"a": torch.full((4,), 1.0)}]
    with refused("ambiguous: 'a'", "'b'"):
        surgery.match_norms(states, [deep, grafted], 1.0)
    scaled, factors = surgery.match_norms(states, [deep, grafted], 1.0, groups=[("a", "b")])  # one factor for both
    assert scaled[1]["a"].tolist() == pytest.approx([factors["b"][1].item()] * 4)


@pytest.mark.gpu
def test_scale__factors_on_a_gpu_are_those_on_the_cpu():
    there, old = [{n: t.cuda() for n, t in state.items()} for state in PAIR], {"w": torch.zeros(64)}
    factors, expected = norm_factors(there, [NARROW, WIDE]), norm_factors(PAIR, [NARROW, WIDE])
    torch.testing.assert_close(factors, expected, rtol=1e-6, atol=0)
    mean = surgery.average(there, [NARROW, WIDE], fallback={"w": old["w"].cuda()}, factors=factors)
    slow = surgery.average(PAIR, [NARROW, WIDE], fallback=old, factors=expected)
    torch.testing.assert_close(mean["w"].cpu(), slow["w"], rtol=1e-5, atol=1e-6)
