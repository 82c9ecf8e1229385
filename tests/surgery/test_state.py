import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from oracles import average as slow_average
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
def test_unstack_inverts_stack(k, seed):
    states = random_states(k, seed)
    back = surgery.unstack(surgery.stack(states))
    assert len(back) == k
    for before, after in zip(states, back):
        assert_same(before, after)


@given(counts, seeds)
def test_average_of_a_broadcast_is_the_state_itself(k, seed):
    (state,) = random_states(1, seed)
    assert_same(surgery.average(surgery.broadcast(state, k)), state, rtol=1e-12, atol=1e-12)


@given(counts, seeds, st.booleans())
def test_average_equals_the_element_by_element_oracle(k, seed, masked):
    generator = torch.Generator().manual_seed(seed)
    states, (fallback,) = random_states(k, seed), random_states(1, seed + 1)
    weights = torch.rand(k, generator=generator, dtype=torch.float64) + 0.1
    masks = None
    if masked:
        masks = [{n: torch.rand(t.shape, generator=generator) < 0.5 for n, t in s.items()} for s in states]
    result = surgery.average(
        surgery.stack(states), weights, surgery.stack(masks) if masks else None, fallback if masks else None
    )
    expected = slow_average(states, weights, masks, fallback if masks else None)
    assert_same(result, expected, rtol=1e-12, atol=1e-12)


@given(st.integers(1, 4), counts, seeds)
def test_rows_of_a_weight_matrix_are_averages_of_their_own(c, k, seed):
    models = surgery.stack(random_states(k, seed))
    weights = torch.rand(c, k, generator=torch.Generator().manual_seed(seed)) + 0.1
    rows = surgery.unstack(surgery.average(models, weights))
    for row, weight in zip(rows, weights, strict=True):
        assert_same(row, surgery.average(models, weight), rtol=1e-6, atol=1e-9)


def test_an_empty_cluster_keeps_its_fallback():
    models = {"w": torch.tensor([[1.0], [3.0]]), "steps": torch.tensor([4, 9])}
    keep = {"w": torch.tensor([[7.0], [8.0]]), "steps": torch.tensor([1, 2])}
    result = surgery.average(models, [[1, 1], [0, 0]], fallback=keep)
    assert result["w"].tolist() == [[2.0], [8.0]]
    assert result["steps"].tolist() == [9, 2]


def test_weight_matrix_with_mask_counts_who_covers():
    models = {"w": torch.tensor([[1.0, 1.0], [3.0, 3.0], [5.0, 5.0]])}
    mask = {"w": torch.tensor([[True, True], [True, False], [False, False]])}
    keep = {"w": torch.full((2, 2), -1.0)}
    result = surgery.average(models, [[1, 1, 0], [0, 1, 1]], mask, keep)
    assert result["w"].tolist() == [[2.0, 1.0], [3.0, -1.0]]


def test_integers_carry_the_maximum_over_models_with_weight():
    models = {"steps": torch.tensor([3, 9, 5]), "flag": torch.tensor([False, True, False])}
    assert surgery.average(models)["steps"].item() == 9
    result = surgery.average(models, [1, 0, 1])
    assert result["steps"].item() == 5
    assert result["flag"].item() is False
    assert result["flag"].dtype is torch.bool


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_average_keeps_the_dtype_and_accumulates_in_float32_at_least(dtype):
    models = {"w": torch.full((4096, 1), 0.5, dtype=dtype)}
    result = surgery.average(models)["w"]
    assert result.dtype is dtype
    assert result.item() == 0.5


def test_inputs_stay_as_they_are():
    states = random_states(3, 0)
    models = surgery.stack(states)
    before = {n: t.clone() for n, t in models.items()}
    surgery.average(models, [1, 2, 3])
    surgery.distance(models, models)
    surgery.cosine(models)
    assert_same(models, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weights": [1.0, 2.0]}, "expected \\[3\\] or \\[C, 3\\]"),
        ({"weights": [0, 0, 0]}, "sum to zero"),
        ({"weights": [1, -1, 1]}, "not negative"),
        ({"weights": [1, float("nan"), 1]}, "finite"),
        ({"mask": {"a": torch.ones(3, 3, 2, dtype=bool)}}, "fallback"),
    ],
)
def test_average_refuses(arguments, message):
    with pytest.raises(surgery.SurgeryError, match=message):
        surgery.average(surgery.stack(random_states(3, 0)), **arguments)


def test_a_mask_for_an_unknown_tensor_is_refused():
    (fallback,) = random_states(1, 0)
    with pytest.raises(surgery.SurgeryError, match="zzz"):
        surgery.average(surgery.stack([fallback]), mask={"zzz": torch.ones(1)}, fallback=fallback)


@given(counts, counts, seeds)
def test_distance_and_cosine_equal_those_of_flat_vectors(k, m, seed):
    a, b = random_states(k, seed), random_states(m, seed + 1)
    flat = [torch.stack([torch.cat([t.flatten() for t in s.values()]) for s in states]) for states in (a, b)]
    distance = surgery.distance(surgery.stack(a), surgery.stack(b))
    torch.testing.assert_close(distance, (flat[0][:, None] - flat[1][None]).norm(dim=2))
    cosine = surgery.cosine(surgery.stack(a), surgery.stack(b))
    torch.testing.assert_close(cosine, nn.functional.cosine_similarity(flat[0][:, None], flat[1][None], dim=2))


def test_distance_between_near_models_does_not_cancel():
    base = {"w": torch.full((1, 1000), 100.0)}
    near = {"w": base["w"] + 2**-10}
    assert surgery.distance(base, near).item() == pytest.approx(2**-10 * 1000**0.5, rel=1e-4)


def test_cosine_of_a_zero_model_is_zero():
    assert surgery.cosine({"w": torch.zeros(2, 3)}).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_state_names_tied_tensors_once_and_load_fills_both():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("mask", torch.ones(2), persistent=False)

    source, target = Tied(), Tied()
    assert list(surgery.state(source)) == ["embed.weight"]
    surgery.load(target, surgery.state(source))
    assert torch.equal(target.head.weight, source.embed.weight)
    assert target.head.weight is target.embed.weight


def test_load_inverts_state_on_a_real_model():
    source, target = torchvision.models.resnet18(), torchvision.models.resnet18()
    surgery.load(target, surgery.state(source))
    for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"a": torch.zeros(2)}, "'b' of state 0 is missing in state 1"),
        ({"a": torch.zeros(2), "b": torch.zeros(1), "c": torch.zeros(1)}, "'c' of state 1 is unknown"),
        ({"a": torch.zeros(3), "b": torch.zeros(1)}, r"\(2,\) in state 0 and \(3,\) in state 1"),
    ],
)
def test_states_of_different_architectures_do_not_stack(other, message):
    with pytest.raises(surgery.SurgeryError, match=message):
        surgery.stack([{"a": torch.zeros(2), "b": torch.zeros(1)}, other])


def test_a_stack_without_a_common_axis_is_refused():
    with pytest.raises(surgery.SurgeryError, match="not a stack"):
        surgery.average({"a": torch.zeros(2, 1), "b": torch.zeros(3, 1)})
    with pytest.raises(surgery.SurgeryError, match="zero states"):
        surgery.stack([])
