import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from drawn_plans import cohorts, embedded, few
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.utils import prune

import fl.extensions.trimmed as module
from fl import FLError
from fl.extensions.trimmed import trimmed_mean
from surgery import Plan, SurgeryError, average, state
from surgery.plan import Source

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


@pytest.mark.slow
@settings(max_examples=150)
@given(stacks(), st.sampled_from(TRIMS), st.sampled_from([1, 2, 1 << 18]))
def test_trimmed__it_is_the_mean_of_what_a_sorted_list_keeps(case, trim, slab):
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


@few
@given(cohorts(), st.sampled_from([0.0, 0.3, 0.4, 0.5]))
def test_trimmed__with_plans_it_is_that_of_the_embedded_models(case, trim):
    states, plans, weights, fallback = case
    factors = {name: torch.arange(1.0, len(states) + 1) / 2 for name in [*fallback][::2]}
    models, mask = embedded(states, plans, fallback)
    scaled = {
        name: tensor * factors[name].view(-1, *[1] * (tensor.ndim - 1))
        if name in factors and tensor.is_floating_point()
        else tensor
        for name, tensor in models.items()
    }
    got = trimmed_mean(states, plans, weights, fallback, trim=trim, factors=factors)
    torch.testing.assert_close(got, trimmed_mean(scaled, None, weights, fallback, trim=trim, mask=mask))
    assert list(got) == list(fallback)
    for name, tensor in got.items():
        assert tensor.dtype == fallback[name].dtype
        assert not tensor.numel() or tensor.data_ptr() != fallback[name].data_ptr()


@pytest.mark.parametrize("trim", TRIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_trimmed__it_agrees_with_numpy_and_the_plain_mean(trim, dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(10, 4, 5, generator=generator).to(dtype)
    got = trimmed_mean({"w": x}, trim=trim)["w"]
    assert got.dtype == dtype
    values, cut = np.sort(x.double().numpy(), axis=0), math.floor(10 * trim + 1e-12)
    wanted = np.median(values, axis=0) if trim == 0.5 else values[cut : 10 - cut].mean(0)
    torch.testing.assert_close(got, torch.from_numpy(wanted).to(dtype))
    if trim == 0:
        torch.testing.assert_close(got, average({"w": x})["w"])


def test_trimmed__attackers_do_not_move_it_far_and_counts_do_not_matter():
    honest = torch.randn(8, 100, generator=torch.Generator().manual_seed(2))
    for evil in (1e30, -1e30, math.inf, math.nan):
        x = torch.cat([honest, torch.full((2, 100), evil)])
        for trim in (0.2, 0.4, 0.5):
            got = trimmed_mean({"w": x}, trim=trim, weights=[1] * 8 + [10**9] * 2)["w"]
            assert ((honest.amin(0) <= got) & (got <= honest.amax(0))).all()


def test_trimmed__any_number_of_models_is_sorted():
    generator = torch.Generator().manual_seed(4)
    for k in (*range(1, 18), 31, 64, 65, 100):
        x = torch.randint(-5, 5, (k, 200), generator=generator).float()
        assert torch.equal(module._sort(x), x.sort(0).values), k


def test_trimmed__clusters_integers_and_what_nobody_has():
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


ONES = {"w": torch.ones(2, 1)}
PLAN = Plan({"w": (Source("w", (((0, 1),),)),)}, {"w": (2,)})


@pytest.mark.parametrize(
    ("call", "error"),
    [
        *((lambda trim=trim: trimmed_mean(ONES, trim=trim), FLError) for trim in (0.6, -0.1, math.nan, True, "0.1")),
        (lambda: trimmed_mean({"w": torch.ones(2, 1, dtype=torch.cfloat)}, trim=0.1), FLError),
        (lambda: trimmed_mean(ONES, trim=0.1, weights=[0, 0]), SurgeryError),
        (lambda: trimmed_mean(ONES, trim=0.1, mask={"w": torch.ones(2, 1) > 0}), SurgeryError),
        (lambda: trimmed_mean(ONES, trim=0.1, fallback={"w": torch.ones(2)}), SurgeryError),
        (lambda: trimmed_mean([{"w": torch.ones(1)}], [PLAN], trim=0.6, fallback={"w": torch.ones(2)}), FLError),
        (lambda: trimmed_mean([{"w": torch.ones(1)}], [PLAN], [0], {"w": torch.ones(1)}, trim=0.1), SurgeryError),
        (lambda: trimmed_mean([{"w": torch.ones(1) * 1j}], [PLAN], None, {"w": torch.ones(2) * 1j}, trim=0), FLError),
    ],
)
def test_trimmed__it_refuses(call, error):
    with pytest.raises(error):
        call()


@pytest.mark.gpu
def test_trimmed__on_a_gpu_it_is_the_same():
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


def test_trimmed__masks_of_pruning_are_not_averaged():
    def model(amount):
        torch.manual_seed(0)
        net = torch.nn.Linear(6, 4)
        prune.l1_unstructured(net, "weight", amount)
        return state(net) | {"weight_orig": torch.randn(4, 6)}

    one, two, other = model(12), model(12), model(5)
    for mean in (average, lambda *given, **settings: trimmed_mean(*given, trim=0.1, **settings)):
        result = mean([one, two, two])
        assert torch.equal(result["weight_mask"], one["weight_mask"])
        torch.testing.assert_close(result["weight_orig"], (one["weight_orig"] + 2 * two["weight_orig"]) / 3)
        with pytest.raises(SurgeryError):
            mean([one, other])
        assert torch.equal(mean([one, other], weights=[0, 2])["weight_mask"], other["weight_mask"])
        both = mean([one, other], weights=[[1, 0], [0, 1]])["weight_mask"]
        assert torch.equal(both, torch.stack([one["weight_mask"], other["weight_mask"]]))
        alone = {name: tensor[None] for name, tensor in one.items()}
        covered = {"weight_mask": torch.zeros(1, 4, 6, dtype=torch.bool)}
        covered["weight_mask"][:, 0] = True
        zeros = {name: torch.zeros_like(tensor) for name, tensor in one.items()}
        found = mean(alone, mask=covered, fallback=zeros)["weight_mask"]
        assert torch.equal(found[0], one["weight_mask"][0])
        assert not found[1:].any()
