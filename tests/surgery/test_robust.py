import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import surgery
import surgery.robust as module
from surgery import SurgeryError, average, average_submodels, stack, trimmed_mean
from surgery.plan import Source, Submodel, as_runs

TRIMS = [0, 0.1, 0.2, 0.29, 0.3, 1 / 3, 0.4, 0.499, 0.5]


def slow(columns, trim, keep):
    """Element by element: sort a list, cut it at both ends, take the mean of what is left."""
    result = []
    for column, old in zip(columns, keep):
        values = sorted(math.inf if math.isnan(v) else v for v in column)
        cut = math.floor(Fraction(str(trim)) * len(values))
        left = values[cut : len(values) - cut] or values[cut - 1 : cut + 1]  # of an even number two are in the middle
        result.append(float(np.mean(left)) if column else old)
    return result


@st.composite
def stacks(draw):
    """A stack with ties and infinities, weights that leave models out, a mask and a fallback."""
    k, n = draw(st.integers(1, 7)), draw(st.integers(0, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    x = torch.randint(-3, 4, (k, n), generator=generator).double() + draw(st.sampled_from([0.0, 0.25]))
    if n and draw(st.booleans()):
        x[draw(st.integers(0, k - 1)), 0] = draw(st.sampled_from([math.inf, -math.inf, math.nan]))
    mask = torch.rand(k, n, generator=generator) < draw(st.sampled_from([0.5, 1.1]))
    weights = draw(st.lists(st.sampled_from([0.0, 0.5, 7.0]), min_size=k, max_size=k))
    return x, weights, mask, -50 - torch.arange(n, dtype=torch.float64)


@settings(max_examples=150, deadline=None)
@given(stacks(), st.sampled_from(TRIMS), st.sampled_from([1, 2, 1 << 18]))
def test_it_is_the_mean_of_what_a_sorted_list_keeps(case, trim, slab):
    x, weights, mask, keep = case
    before = x.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_SLAB", slab)
        got = trimmed_mean(
            {"w": x.view(len(x), 1, -1)},
            trim=trim,
            weights=weights,
            mask={"w": mask[:, None]},
            fallback={"w": keep[None]},
        )["w"]
        plain = trimmed_mean({"w": x}, trim=trim)["w"]
    columns = [[float(v) for v, c, w in zip(x[:, j], mask[:, j], weights) if c and w] for j in range(x.shape[1])]
    expected = torch.tensor([slow(columns, trim, keep.tolist())], dtype=torch.float64)
    torch.testing.assert_close(got, expected, equal_nan=True)
    expected = torch.tensor(slow(x.T.tolist(), trim, keep.tolist()), dtype=torch.float64)
    torch.testing.assert_close(plain, expected, equal_nan=True)
    assert torch.equal(x.nan_to_num(), before.nan_to_num())


@pytest.mark.parametrize("trim", TRIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_agrees_with_numpy_and_the_plain_mean(trim, dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(10, 4, 5, generator=generator).to(dtype)
    got = trimmed_mean({"w": x}, trim=trim)["w"]
    assert got.dtype == dtype
    values, cut = np.sort(x.double().numpy(), axis=0), math.floor(10 * trim + 1e-12)
    wanted = np.median(values, axis=0) if trim == 0.5 else values[cut : 10 - cut].mean(0)
    torch.testing.assert_close(got, torch.from_numpy(wanted).to(dtype))
    if trim == 0:
        torch.testing.assert_close(got, average({"w": x})["w"])


def test_attackers_do_not_move_it_far_and_counts_do_not_matter():
    honest = torch.randn(8, 100, generator=torch.Generator().manual_seed(2))
    for evil in (1e30, -1e30, math.inf, math.nan):
        x = torch.cat([honest, torch.full((2, 100), evil)])
        for trim in (0.2, 0.4, 0.5):
            got = trimmed_mean({"w": x}, trim=trim, weights=[1] * 8 + [10**9] * 2)["w"]
            assert ((honest.amin(0) <= got) & (got <= honest.amax(0))).all()


def test_any_number_of_models_is_sorted():
    generator = torch.Generator().manual_seed(4)
    for k in (*range(1, 18), 31, 64, 65, 100):
        x = torch.randint(-5, 5, (k, 200), generator=generator).float()
        assert torch.equal(module._sorted(x), x.sort(0).values), k


def test_clusters_integers_and_what_nobody_has():
    x = {"w": torch.tensor([[1.0], [2.0], [9.0], [4.0]]), "n": torch.tensor([3, 300, 5, 4]), "on": torch.eye(4)[0] > 0}
    weights = [[1, 1, 2, 0], [0, 0, 0, 5], [0, 0, 0, 0]]
    keep = {"w": torch.tensor([[7.0], [8.0], [9.5]]), "n": torch.tensor([1, 2, 3]), "on": torch.tensor([True] * 3)}
    got = trimmed_mean(x, trim=0.34, weights=weights, fallback=keep)
    assert got["w"].tolist() == [[2.0], [4.0], [9.5]]
    assert got["n"].tolist() == [300, 4, 3]
    assert got["on"].tolist() == [True, False, True]
    one = {name: tensor[2] for name, tensor in keep.items()}  # a fallback for all clusters
    assert trimmed_mean(x, trim=0.34, weights=weights, fallback=one)["w"].tolist() == [[2.0], [4.0], [9.5]]
    mask = {"n": torch.tensor([True, False, False, True])}
    assert trimmed_mean(x, trim=0.5, mask=mask, fallback=one)["n"] == 4


@st.composite
def submodels(draw):
    """K states of narrow models, some of which stand for two tensors, their plans, weights, factors, a fallback."""
    shapes = {"a.w": (4, 3), "b.w": (4, 3), "a.n": (), "b.n": (), "v": (5,)}
    k, generator = draw(st.integers(1, 5)), torch.Generator().manual_seed(draw(st.integers(0, 999)))

    def runs(size):
        return as_runs(sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))) if draw(st.booleans()) else None

    plans = []
    for _ in range(k):
        index, both = (runs(4), runs(3)), draw(st.booleans())
        entries = {"a.w": (Source("a.w", index),), "a.n": (Source("a.n", ()),)}
        if both:
            entries = {name: (s, s._replace(name=f"b{s.name[1:]}")) for name, (s,) in entries.items()}
        if draw(st.booleans()):
            entries["v"] = (Source("v", (runs(5),)),)
        plans.append(Submodel(entries, shapes))

    def values(name, shape):
        if name.endswith("n"):
            return torch.randint(-9, 9, shape, generator=generator)
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    states = [{name: values(name, shape) for name, shape in plan.small_shapes.items()} for plan in plans]
    weights = draw(st.lists(st.sampled_from([0.0, 1.0, 30.0]), min_size=k, max_size=k))
    factors = {name: torch.rand(k, generator=generator) + 0.5 for name in draw(st.sets(st.sampled_from(["b.w", "v"])))}
    return states, plans, {name: values(name, shape) for name, shape in shapes.items()}, weights, factors


@settings(max_examples=60, deadline=None)
@given(submodels(), st.sampled_from(TRIMS))
def test_submodels_are_as_if_embedded(case, trim):
    states, plans, keep, weights, factors = case
    pairs = [plan.embed(state) for plan, state in zip(plans, states)]
    for k, (full, _) in enumerate(pairs):
        for name, given_factors in factors.items():
            full[name] *= given_factors[k]
    masks = stack([mask for _, mask in pairs])
    expected = trimmed_mean(stack([full for full, _ in pairs]), trim=trim, weights=weights, mask=masks, fallback=keep)
    got = average_submodels(states, plans, fallback=keep, trim=trim, weights=weights, factors=factors)
    assert list(got) == list(keep)
    for name, tensor in got.items():
        assert tensor.dtype == keep[name].dtype
        torch.testing.assert_close(tensor, expected[name])
        assert tensor.data_ptr() != keep[name].data_ptr()


def test_without_trimming_submodels_are_averaged():
    net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Conv2d(8, 2, 3))
    parts = [surgery.narrow(net, rate=rate, example=torch.zeros(2, 3, 8, 8)) for rate in (0.5, 1.0, 0.75, 0.5)]
    states, plans = [surgery.state(small) for small, _ in parts], [plan for _, plan in parts]
    keep = surgery.state(net)
    got = average_submodels(states, plans, fallback=keep, trim=0.0, weights=[1, 5, 0, 2])
    torch.testing.assert_close(got, surgery.average_submodels(states, plans, fallback=keep, weights=[1, 1, 0, 1]))


PLAN = Submodel({"w": (Source("w", (((0, 1),),)),)}, {"w": (2,)})
OTHER = Submodel({"w": (Source("w", (((0, 1),),)),)}, {"w": (3,)})
SMALL, FULL = {"w": torch.ones(1)}, {"w": torch.ones(2)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: trimmed_mean({"w": torch.ones(2, 1)}, trim=0.6), r"in \[0, 0.5\].*got 0.6"),
        (lambda: trimmed_mean({"w": torch.ones(2, 1)}, trim=math.nan), "got nan"),
        (lambda: trimmed_mean({"w": torch.ones(2, 1)}, trim=True), "got True"),
        (lambda: trimmed_mean({"w": torch.ones(2, 1, dtype=torch.cfloat)}, trim=0.1), "'w' is torch.complex64"),
        (lambda: trimmed_mean({"w": torch.ones(2, 1)}, trim=0.1, weights=[0, 0]), "fallback"),
        (lambda: trimmed_mean({"w": torch.ones(2, 1)}, trim=0.1, mask={"w": torch.ones(2, 1) > 0}), "fallback"),
        (lambda: trimmed_mean({"w": torch.ones(2, 1)}, trim=0.1, fallback=FULL), "the fallback"),
        (lambda: average_submodels([SMALL], [], fallback=FULL, trim=0.1), "1 states and 0 plans"),
        (
            lambda: average_submodels([SMALL] * 2, [PLAN, OTHER], fallback=FULL, trim=0.1),
            "plan 1 is of the full model",
        ),
        (lambda: average_submodels([FULL], [PLAN], fallback=FULL, trim=0.1), r"plan 0 and \(2,\) in state 0"),
        (lambda: average_submodels([SMALL], [PLAN], fallback=SMALL, trim=0.1), "the fallback"),
        (
            lambda: average_submodels([SMALL], [PLAN], fallback=FULL, trim=0.1, weights=[[1.0]]),
            "one for each client",
        ),
        (
            lambda: average_submodels([SMALL], [PLAN], fallback={"w": torch.ones(2).long()}, trim=0.1),
            "float32 in a state",
        ),
        (
            lambda: average_submodels([SMALL], [PLAN], fallback=FULL, trim=0.1, factors={"v": [1.0]}),
            "factors name 'v'",
        ),
        (
            lambda: average_submodels([SMALL], [PLAN], fallback=FULL, trim=0.1, factors={"w": [1, 1]}),
            "factors of .w. have shape",
        ),
    ],
)
def test_it_refuses(call, message):
    with pytest.raises(SurgeryError, match=message):
        call()


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_same():
    generator = torch.Generator().manual_seed(3)
    x, mask = torch.randn(9, 50, generator=generator), torch.rand(9, 50, generator=generator) < 0.6
    x[3, :25] = math.nan
    keep = torch.zeros(50)
    for trim in TRIMS:
        cpu = trimmed_mean({"w": x}, trim=trim, weights=[1] * 8 + [0], mask={"w": mask}, fallback={"w": keep})["w"]
        gpu = trimmed_mean(
            {"w": x.cuda()}, trim=trim, weights=[1] * 8 + [0], mask={"w": mask.cuda()}, fallback={"w": keep.cuda()}
        )["w"]
        assert gpu.is_cuda
        torch.testing.assert_close(gpu.cpu(), cpu, equal_nan=True)
