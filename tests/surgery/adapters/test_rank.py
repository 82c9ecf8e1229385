"""Adapters of other ranks: what is exact, and how far off the rest is."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surgery import SurgeryError, adapters

SIZES = st.integers(1, 6)


@st.composite
def states(draw, out=None, into=None):
    out, into = out or draw(SIZES), into or draw(SIZES)
    rank, kernel = draw(SIZES), draw(st.sampled_from([(), (3,), (2, 3)]))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    a = torch.randn(rank, into, *kernel, generator=rng, dtype=torch.float64)
    b = torch.randn(out, rank, *(1 for _ in kernel), generator=rng, dtype=torch.float64)
    return {"x.lora_A.weight": a, "x.lora_B.weight": b, "y": torch.rand(2, generator=rng, dtype=torch.float64)}


def product(tensors):
    return adapters.products(tensors)["x"]


@given(states(), SIZES)
def test_a_rank_that_grows_changes_no_product(tensors, more):
    rank = adapters.rank_of(tensors)["x"] + more
    grown, error = adapters.resize(tensors, rank, generator=torch.Generator().manual_seed(0))
    assert adapters.rank_of(grown) == {"x": rank}
    assert error == {"x": 0.0}
    torch.testing.assert_close(product(grown), product(tensors), rtol=0, atol=1e-10)
    assert grown["x.lora_A.weight"][-1].abs().min() > 0
    assert torch.equal(grown["y"], tensors["y"])


@given(states(), SIZES)
def test_svd_is_the_best_product_of_its_rank_and_its_error_is_told(tensors, rank):
    small, error = adapters.resize(tensors, rank)
    assert adapters.rank_of(small) == {"x": rank}
    whole, left = product(tensors).flatten(1), product(small).flatten(1)
    values = torch.linalg.svdvals(whole)
    best = values[rank:].norm() / values.norm()
    assert error["x"] == pytest.approx(float(best), abs=1e-10)
    assert float((whole - left).norm() / whole.norm()) == pytest.approx(error["x"], abs=1e-7)


@given(states(), SIZES)
def test_truncating_keeps_the_first_and_its_error_is_told(tensors, rank):
    small, error = adapters.resize(tensors, rank, how="truncate")
    kept = min(rank, adapters.rank_of(tensors)["x"])
    assert torch.equal(small["x.lora_A.weight"][:kept], tensors["x.lora_A.weight"][:kept])
    whole = product(tensors)
    assert float((whole - product(small)).norm() / whole.norm()) == pytest.approx(error["x"], abs=1e-10)


@pytest.mark.slow
@given(st.data(), SIZES, SIZES, st.integers(1, 4))
def test_stacking_is_the_mean_of_products(data, out, into, count):
    every = [data.draw(states(out, into)) for _ in range(count)]
    every = [one for one in every if one["x.lora_A.weight"].shape[1:] == every[0]["x.lora_A.weight"].shape[1:]]
    weights = data.draw(st.lists(st.integers(1, 5), min_size=len(every), max_size=len(every)))
    stacked = adapters.stack(every, weights)
    expected = sum(weight * product(one) for weight, one in zip(weights, every)) / sum(weights)
    torch.testing.assert_close(product(stacked), expected, rtol=0, atol=1e-10)
    assert adapters.rank_of(stacked)["x"] == sum(adapters.rank_of(one)["x"] for one in every)
    torch.testing.assert_close(stacked["y"], sum(w * one["y"] for w, one in zip(weights, every)) / sum(weights))
    # As many rows as the layer has inputs or outputs hold every product.
    again = adapters.resize(stacked, 36).state
    torch.testing.assert_close(product(again), expected, rtol=0, atol=1e-10)


def test_a_product_of_zero_stays_zero():
    tensors = {"x.lora_A.weight": torch.ones(3, 4), "x.lora_B.weight": torch.zeros(2, 3)}
    small, error = adapters.resize(tensors, 1)
    assert error == {"x": 0.0}
    assert not product(small).any()


def test_half_precision_is_decomposed_in_single():
    tensors = {"x.lora_A.weight": torch.rand(3, 4).bfloat16(), "x.lora_B.weight": torch.rand(2, 3).bfloat16()}
    small, _ = adapters.resize(tensors, 2)
    assert {tensor.dtype for tensor in small.values()} == {torch.bfloat16}


ONE = {"x.lora_A.weight": torch.ones(2, 4), "x.lora_B.weight": torch.ones(3, 2)}
UNEQUAL = {"x.lora_A.weight": torch.ones(2, 4), "x.lora_B.weight": torch.ones(3, 1)}
OTHER = {"x.lora_A.weight": torch.ones(2, 5), "x.lora_B.weight": torch.ones(3, 2)}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: adapters.resize(ONE, 0), "rank=0"),
        (lambda: adapters.resize(ONE, {"z": 1}), "rank is given for"),
        (lambda: adapters.resize(ONE, 1, how="half"), "give svd or truncate"),
        (lambda: adapters.resize(ONE | {"x.lora_B.weight": torch.full((3, 2), torch.nan)}, 1), "'x' holds NaN"),
        (lambda: adapters.stack([]), "no adapters to stack"),
        (lambda: adapters.stack([ONE, ONE], [1]), r"weights \[1.0\] for 2 states"),
        (lambda: adapters.stack([ONE, ONE], [0, 0]), "one above 0"),
        (lambda: adapters.stack([ONE, OTHER]), "the architectures differ"),
        (lambda: adapters.rank_of(UNEQUAL), "unequal"),
    ],
)
def test_what_is_refused(call, message):
    with pytest.raises(SurgeryError, match=message):
        call()


def test_an_adapter_without_rows_grows_into_a_new_one():
    none = {"fc.lora_A.weight": torch.zeros(0, 4), "fc.lora_B.weight": torch.zeros(3, 0)}
    new = adapters.resize(none, 2, how="truncate", generator=torch.Generator().manual_seed(0)).state
    expected = torch.empty(2, 4).uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(new["fc.lora_A.weight"], expected)
    assert torch.equal(new["fc.lora_B.weight"], torch.zeros(3, 2))
