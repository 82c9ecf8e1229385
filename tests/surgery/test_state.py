import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from oracles import average as slow_average
from refusals import refused
from torch import nn

import surgery


def random_states(k, seed, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 2), "b": (4,), "scalar": ()}
    return [{n: torch.randn(s, generator=generator, dtype=dtype) for n, s in shapes.items()} for _ in range(k)]


def assert_same(a, b, **tolerance):
    assert list(a) == list(b)
    for name in a:
        torch.testing.assert_close(a[name], b[name], **tolerance or {"rtol": 0, "atol": 0})


seeds, counts = st.integers(0, 10**6), st.integers(1, 6)


@given(counts, seeds)
def test_state__unstack_inverts_stack(k, seed):
    states = random_states(k, seed)
    back = surgery.unstack(surgery.stack(states))
    assert len(back) == k
    for before, after in zip(states, back):
        assert_same(before, after)


@given(counts, seeds, st.booleans())
def test_state__average_equals_the_element_by_element_oracle(k, seed, masked):
    generator = torch.Generator().manual_seed(seed)
    states, (fallback,) = random_states(k, seed), random_states(1, seed + 1)
    weights = torch.rand(k, generator=generator, dtype=torch.float64) + 0.1
    masks = None
    if masked:
        masks = [{n: torch.rand(t.shape, generator=generator) < 0.5 for n, t in s.items()} for s in states]
    result = surgery.average(
        surgery.stack(states),
        weights=weights,
        mask=surgery.stack(masks) if masks else None,
        fallback=fallback if masks else None,
    )
    expected = slow_average(states, weights, masks, fallback if masks else None)
    assert_same(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@given(st.integers(1, 4), counts, seeds)
def test_state__rows_of_a_weight_matrix_are_averages_of_their_own(c, k, seed):
    models = surgery.stack(random_states(k, seed))
    weights = torch.rand(c, k, generator=torch.Generator().manual_seed(seed)) + 0.1
    rows = surgery.unstack(surgery.average(models, weights=weights))
    for row, weight in zip(rows, weights, strict=True):
        assert_same(row, surgery.average(models, weights=weight), rtol=1e-6, atol=1e-9)


def test_state__an_empty_cluster_keeps_its_fallback():
    models = {"w": torch.tensor([[1.0], [3.0]]), "steps": torch.tensor([4, 9])}
    keep = {"w": torch.tensor([[7.0], [8.0]]), "steps": torch.tensor([1, 2])}
    result = surgery.average(models, weights=[[1, 1], [0, 0]], fallback=keep)
    assert result["w"].tolist() == [[2.0], [8.0]]
    assert result["steps"].tolist() == [9, 2]


def test_state__weight_matrix_with_mask_counts_who_covers():
    models = {"w": torch.tensor([[1.0, 1.0], [3.0, 3.0], [5.0, 5.0]])}
    mask = {"w": torch.tensor([[True, True], [True, False], [False, False]])}
    keep = {"w": torch.full((2, 2), -1.0)}
    result = surgery.average(models, weights=[[1, 1, 0], [0, 1, 1]], mask=mask, fallback=keep)
    assert result["w"].tolist() == [[2.0, 1.0], [3.0, -1.0]]


def test_state__integers_carry_the_maximum_over_models_with_weight():
    models = {"steps": torch.tensor([3, 9, 5]), "flag": torch.tensor([False, True, False])}
    assert surgery.average(models)["steps"].item() == 9
    result = surgery.average(models, weights=[1, 0, 1])
    assert result["steps"].item() == 5
    assert result["flag"].item() is False
    assert result["flag"].dtype is torch.bool


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_state__average_keeps_the_dtype_and_accumulates_in_float32_at_least(dtype):
    values = torch.rand(4096, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    result = surgery.average({"w": values})["w"]
    assert result.dtype is dtype
    torch.testing.assert_close(result, values.double().mean(0).to(dtype))


@given(st.integers(1, 5), seeds)
def test_state__a_model_without_weight_takes_no_part_whatever_it_holds(k, seed):
    """A diverged model must not poison the clusters that it is not in."""
    states = random_states(k, seed)
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in states[0].items()}
    result = surgery.average(surgery.stack([*states, broken]), weights=[[1.0] * k + [0.0], [0.0] * k + [1.0]])
    healthy, ill = surgery.unstack(result)
    assert_same(healthy, surgery.average(surgery.stack(states)))
    assert all(tensor.isnan().all() for tensor in ill.values())


def test_state__extreme_weights_and_odd_dtypes():
    models = {"w": torch.tensor([[1.0], [3.0]])}
    everyone, keep = {"w": torch.ones(2, 1, dtype=torch.bool)}, {"w": torch.zeros(1)}
    for weight in (1e-320, 1e-60, 2.0**60, 1e300):
        assert surgery.average(models, weights=[weight, weight])["w"].item() == 2
        assert surgery.average(models, weights=[weight, weight], mask=everyone, fallback=keep)["w"].item() == 2
    assert surgery.average(models, weights=[1e308, 1e308])["w"].item() == 2
    lonely = {"w": torch.tensor([[False], [True]])}
    assert surgery.average(models, weights=[1.0, 1e-46], mask=lonely, fallback=keep)["w"].item() == pytest.approx(3)
    surgery.average(models, weights=[0, 0], fallback=keep)["w"].add_(1)
    assert keep["w"].item() == 0
    assert surgery.average({"c": torch.tensor([[1 + 1j], [3 + 3j]])})["c"].tolist() == [2 + 2j]
    assert surgery.average({"n": torch.tensor([[1], [3]], dtype=torch.uint16)})["n"].tolist() == [3]
    assert surgery.average({"e": torch.zeros(2, 0), "w": torch.ones(2, 1)})["e"].shape == (0,)


def test_state__inputs_stay_as_they_are():
    states = random_states(3, 0)
    models = surgery.stack(states)
    before = {n: t.clone() for n, t in models.items()}
    surgery.average(models, weights=[1, 2, 3])
    surgery.distance(models, models)
    surgery.cosine(models)
    assert_same(models, before)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"weights": [1.0, 2.0]}, "argument"),
        ({"weights": [0, 0, 0]}, "argument"),
        ({"weights": [1, -1, 1]}, "argument"),
        ({"weights": [1, float("nan"), 1]}, "argument"),
        ({"weights": torch.ones(3, dtype=torch.complex64)}, "argument: weights"),
        ({"weights": "abc"}, "argument: weights"),
        ({"mask": {"a": torch.ones(3, 3, 2, dtype=bool)}}, "argument: fallback"),
        ({"mask": {"a": torch.ones(3, 3, 2)}, "fallback": {}}, "argument"),
        ({"mask": {"a": torch.ones(3, 2, 2, dtype=bool)}, "fallback": {}}, "mismatch"),
        ({"mask": {"zzz": torch.ones(1)}, "fallback": {}}, "name: 'zzz'"),
        ({"fallback": {"a": torch.zeros(3, 2)}}, "mismatch"),
        ({"fallback": {**random_states(1, 0)[0], "zzz": torch.zeros(1)}}, "mismatch: zzz"),
        ({"fallback": {**random_states(1, 0)[0], "b": torch.zeros(1)}}, "mismatch: 'b'"),
    ],
)
def test_state__average_refuses(arguments, expected):
    with refused(expected):
        surgery.average(surgery.stack(random_states(3, 0)), **arguments)


@given(counts, counts, seeds)
def test_state__distance_and_cosine_equal_those_of_flat_vectors(k, m, seed):
    a, b = random_states(k, seed), random_states(m, seed + 1)
    flat = [torch.stack([torch.cat([t.flatten() for t in s.values()]) for s in states]) for states in (a, b)]
    distance = surgery.distance(surgery.stack(a), surgery.stack(b))
    torch.testing.assert_close(distance, (flat[0][:, None] - flat[1][None]).norm(dim=2))
    cosine = surgery.cosine(surgery.stack(a), surgery.stack(b))
    torch.testing.assert_close(cosine, nn.functional.cosine_similarity(flat[0][:, None], flat[1][None], dim=2))


def test_state__distance_between_near_models_does_not_cancel():
    base = {"w": torch.full((1, 1000), 100.0)}
    near = {"w": base["w"] + 2**-10}
    assert surgery.distance(base, near).item() == pytest.approx(2**-10 * 1000**0.5, rel=1e-4)


def test_state__distances_leave_integers_out():
    a = {"w": torch.zeros(1, 2), "steps": torch.tensor([0])}
    b = {"w": torch.zeros(1, 2), "steps": torch.tensor([9])}
    assert surgery.distance(a, b).item() == 0
    with refused("unsupported"):
        surgery.distance(a, {"w": torch.zeros(1, 2), "steps": torch.tensor([9.0])})


@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_state__cosine_neither_overflows_nor_vanishes_and_shows_nan(size):
    models = {"w": torch.tensor([[size, 0.0], [size, size], [float("nan"), 0.0]])}
    cosine = surgery.cosine(models)
    assert surgery.cosine({"w": torch.zeros(2, 3)}).tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert cosine[0, 1].item() == pytest.approx(0.5**0.5)
    assert cosine[2].isnan().all()


def test_state__names_tied_tensors_once_and_load_fills_both():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("copy", self.head.weight)
            self.register_buffer("mask", torch.ones(2), persistent=False)

    source, target = Tied(), Tied()
    assert list(surgery.state(source)) == ["embed.weight"]
    surgery.load(target, surgery.state(source))
    assert torch.equal(target.head.weight, source.embed.weight)
    assert target.head.weight is target.embed.weight


def test_state__load_takes_a_models_own_tensors_in_other_places():
    net = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    first, second = (layer.weight.detach().clone() for layer in net)
    own = surgery.state(net)
    surgery.load(net, {"0.weight": own["1.weight"], "1.weight": own["0.weight"].T})
    assert torch.equal(net[0].weight, second)
    assert torch.equal(net[1].weight, first.T)


def test_state__load_takes_tensors_that_wrap_others():
    pair = pytest.importorskip(
        "torch.testing._internal.two_tensor"
    ).TwoTensor  # as a DTensor, without memory of its own
    nets = [nn.Linear(2, 2, bias=False) for _ in range(2)]
    for net in nets:
        net.weight = nn.Parameter(pair(torch.randn(2, 2), torch.randn(2, 2)))
    surgery.load(nets[0], nets[1])
    assert torch.equal(nets[0].weight.b, nets[1].weight.b)


def test_state__what_would_be_lost_or_cannot_be_filled_is_refused():
    class Extra(nn.Linear):
        def get_extra_state(self):
            return {"calls": 3}

    for net, expected in ((nn.LazyLinear(3), "unsupported"), (Extra(1, 1), "unsupported")):
        with refused(expected):
            surgery.state(nn.Sequential(net))
    with refused("values"):
        surgery.load(nn.Linear(1, 1, device="meta"), surgery.state(nn.Linear(1, 1)))
    assert surgery.state(torchvision.models.quantization.resnet18(weights=None, quantize=False))
    norm = nn.BatchNorm1d(1)
    values = surgery.state(norm) | {"num_batches_tracked": torch.tensor(1.7)}
    with refused("mismatch"):
        surgery.load(norm, values)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"a": torch.zeros(2)}, "mismatch: 'b'"),
        ({"a": torch.zeros(2), "b": torch.zeros(1), "c": torch.zeros(1)}, "mismatch: 'c'"),
        ({"a": torch.zeros(3), "b": torch.zeros(1)}, "mismatch"),
    ],
)
def test_state__states_of_different_architectures_do_not_stack(other, expected):
    with refused(expected):
        surgery.stack([{"a": torch.zeros(2), "b": torch.zeros(1)}, other])


def test_state__a_stack_without_a_common_axis_is_refused():
    with refused("argument"):
        surgery.average({"a": torch.zeros(2, 1), "b": torch.zeros(3, 1)})
    with refused("argument"):
        surgery.stack([])
    with refused("argument"):
        surgery.average({"a": torch.zeros(0, 1)})
    with refused("argument: k="):
        surgery.broadcast({"a": torch.zeros(1)}, 0)


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_state__load_says_which_key_of_a_checkpoint_holds_the_state(key):
    net = nn.Linear(2, 3)
    for fit in (None, "whole"):
        with refused("argument", repr(key)):
            surgery.load(net, {key: net.state_dict(), "epoch": 3, "optimizer": {"state": {}}}, fit=fit)
