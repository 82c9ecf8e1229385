"""Adapters of other ranks: what is exact, and how far off the rest is."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

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
def test_rank__a_rank_that_grows_changes_no_product(tensors, more):
    rank = adapters.rank_of(tensors)["x"] + more
    grown, error = adapters.resize(tensors, rank, generator=torch.Generator().manual_seed(0))
    assert adapters.rank_of(grown) == {"x": rank}
    assert error == {"x": 0.0}
    torch.testing.assert_close(product(grown), product(tensors), rtol=0, atol=1e-10)
    assert grown["x.lora_A.weight"][-1].abs().min() > 0
    assert torch.equal(grown["y"], tensors["y"])


@given(states(), SIZES)
def test_rank__svd_is_the_best_product_of_its_rank_and_its_error_is_told(tensors, rank):
    small, error = adapters.resize(tensors, rank)
    assert adapters.rank_of(small) == {"x": rank}
    whole, left = product(tensors).flatten(1), product(small).flatten(1)
    values = torch.linalg.svdvals(whole)
    best = values[rank:].norm() / values.norm()
    assert error["x"] == pytest.approx(float(best), abs=1e-10)
    assert float((whole - left).norm() / whole.norm()) == pytest.approx(error["x"], abs=1e-7)


@given(states(), SIZES)
def test_rank__truncating_keeps_the_first_and_its_error_is_told(tensors, rank):
    small, error = adapters.resize(tensors, rank, how="truncate")
    kept = min(rank, adapters.rank_of(tensors)["x"])
    assert torch.equal(small["x.lora_A.weight"][:kept], tensors["x.lora_A.weight"][:kept])
    whole = product(tensors)
    assert float((whole - product(small)).norm() / whole.norm()) == pytest.approx(error["x"], abs=1e-10)


@given(st.data(), SIZES, SIZES, st.integers(1, 4))
def test_rank__stacking_is_the_mean_of_products(data, out, into, count):
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


def test_rank__a_product_of_zero_stays_zero():
    tensors = {"x.lora_A.weight": torch.ones(3, 4), "x.lora_B.weight": torch.zeros(2, 3)}
    small, error = adapters.resize(tensors, 1)
    assert error == {"x": 0.0}
    assert not product(small).any()


def test_rank__half_precision_is_decomposed_in_single():
    tensors = {"x.lora_A.weight": torch.rand(3, 4).bfloat16(), "x.lora_B.weight": torch.rand(2, 3).bfloat16()}
    small, _ = adapters.resize(tensors, 2)
    assert {tensor.dtype for tensor in small.values()} == {torch.bfloat16}


NAMES = [
    ("x", "x.lora_A.weight", "x.lora_B.weight"),
    ("x", "x.lora_embedding_A", "x.lora_embedding_B"),
    ("base_model.model.x", "base_model.model.x.lora_A.default.weight", "base_model.model.x.lora_B.default.weight"),
    ("x", "x.lora_embedding_A.mine", "x.lora_embedding_B.mine"),
    ("x", "x.lora_A.a.b.weight", "x.lora_B.a.b.weight"),
    ("x", "x.lora_embedding_A.v1.0", "x.lora_embedding_B.v1.0"),
    ("lora_unet_x", "lora_unet_x.lora_down.weight", "lora_unet_x.lora_up.weight"),
    ("unet.x.to_q", "unet.x.to_q.lora.down.weight", "unet.x.to_q.lora.up.weight"),
    ("te.x.q_proj", "te.x.q_proj.lora_linear_layer.down.weight", "te.x.q_proj.lora_linear_layer.up.weight"),
    ("x.processor.to_q_lora", "x.processor.to_q_lora.down.weight", "x.processor.to_q_lora.up.weight"),
    ("x", "x.lora_a.weight", "x.lora_b.weight"),
    ("x", "x.lora_A", "x.lora_B"),
    ("", "lora_A.weight", "lora_B.weight"),
]


def test_rank__every_spelling_is_resized_and_stacked_under_its_own_names():
    rng = torch.Generator().manual_seed(0)
    for (module, first, second), kernel in itertools.product(NAMES, [(), (3, 3)]):
        one, two = (
            {first: torch.randn(r, 7, *kernel, generator=rng), second: torch.randn(5, r, *(1 for _ in kernel))}
            for r in (4, 3)
        )
        assert adapters.rank_of(one) == {module: 4}
        small, error = adapters.resize(one, 2)
        assert list(small) == list(one)
        assert (len(small[first]), small[second].shape[1]) == (2, 2)
        assert error[module] > 0
        both = adapters.stack([one, two], [3, 1])
        assert list(both) == list(one)
        expected = (3 * adapters.products(one)[module] + adapters.products(two)[module]) / 4
        torch.testing.assert_close(adapters.products(both)[module], expected)
        left = (one[second].flatten(1) @ one[first].flatten(1)).view_as(expected)
        torch.testing.assert_close(adapters.products(one)[module], left)


@pytest.mark.parametrize("alpha", [torch.tensor(2.0), torch.tensor(1), torch.tensor([3.0]).bfloat16()])
def test_rank__alpha_follows_the_rank(alpha):
    rng = torch.Generator().manual_seed(0)
    one, two = (
        {
            "x.alpha": k * alpha,
            "x.lora_down.weight": torch.randn(r, 7, generator=rng),
            "x.lora_up.weight": torch.randn(5, r),
        }
        for k, r in ((1, 4), (3, 3))
    )
    whole = alpha.item() / 4 * one["x.lora_up.weight"] @ one["x.lora_down.weight"]
    torch.testing.assert_close(product(one), whole)
    for rank in (6, 7):
        torch.testing.assert_close(product(adapters.resize(one, rank).state), whole)
    small, error = adapters.resize(one, 3)
    assert float((whole - product(small)).norm() / whole.norm()) == pytest.approx(error["x"], abs=1e-6)
    assert small["x.alpha"].item() == pytest.approx(0.75 * alpha.item(), abs=1)
    both = adapters.stack([one, two], [1, 3])
    torch.testing.assert_close(product(both), (whole + 3 * product(two)) / 4)
    assert adapters.rank_of(both) == {"x": 7}


def test_rank__the_state_of_a_peft_model_is_resized():
    peft = pytest.importorskip("peft")
    net = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    config = peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False, use_dora=True)
    whole = peft.get_peft_model(net, config).state_dict()
    result = adapters.resize(whole, 2)
    assert list(result.state) == list(whole)
    assert adapters.rank_of(result.state) == dict.fromkeys(["base_model.model.0", "base_model.model.2"], 2)
    same = [name for name in whole if "lora_A" not in name and "lora_B" not in name]
    assert any("magnitude" in name for name in same)
    assert all(torch.equal(result.state[name], whole[name]) for name in same)
    with refused("unsupported"):
        adapters.stack([whole, whole])


ONE = {"x.lora_A.weight": torch.ones(2, 4), "x.lora_B.weight": torch.ones(3, 2)}
UNEQUAL = {"x.lora_A.weight": torch.ones(2, 4), "x.lora_B.weight": torch.ones(3, 1)}
OTHER = {"x.lora_A.weight": torch.ones(2, 5), "x.lora_B.weight": torch.ones(3, 2)}


KOHYA = {"x.lora_down.weight": torch.ones(2, 4), "x.lora_up.weight": torch.ones(3, 2)}


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"x.weight": torch.ones(2, 2)},
        {"x.lora_down.weight": torch.ones(2, 4)},
        {"x.lora_B.default.weight": torch.ones(3, 2)},
        ONE | KOHYA,
        ONE | {"y.lora_up.weight": torch.ones(3, 2)},
        ONE | {"x.lora_A.other.weight": torch.ones(2, 4), "x.lora_B.other.weight": torch.ones(3, 2)},
        {f"{x}.lora_{y}.{x}.weight": torch.ones(2, 2) for x in "xy" for y in "AB"},
        {f"x.lora_{y}.v1.{x}.weight": torch.ones(2, 2) for x in "xy" for y in "AB"},
        ONE | {"x.lora_E": torch.ones(2, 1)},
        KOHYA | {"x.lora_mid.weight": torch.ones(2, 2, 3, 3)},
        KOHYA | {"x.scalar": torch.ones(())},
        KOHYA | {"y.hada_w1_a": torch.ones(2, 2)},
        {"x.lora_A.default": torch.ones(2, 4), "x.lora_B.default": torch.ones(3, 2)},
        KOHYA | {"x.lora_up.weight": torch.ones(3, 2, 3, 3)},
    ],
)
def test_rank__a_state_without_whole_adapters_of_one_name_is_refused(tensors):
    for call in (
        adapters.rank_of,
        adapters.products,
        lambda one: adapters.resize(one, 1),
        lambda one: adapters.stack([one]),
    ):
        with pytest.raises(SurgeryError) as caught:
            call(tensors)
        assert caught.value.code in ("mismatch", "unsupported", "argument")


def test_rank__an_alpha_beside_another_scale_is_refused():
    net = torch.nn.Sequential(torch.nn.Linear(4, 3))
    tensors = {name.replace("x", "0"): tensor for name, tensor in ONE.items()}
    adapters.attach(net, tensors)
    with refused("argument"):
        adapters.attach(net, tensors | {"0.alpha": torch.tensor(1.0)})


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: adapters.resize(KOHYA | {"x.alpha": torch.tensor(torch.nan)}, 1), "values: 'x.alpha'"),
        (lambda: adapters.stack([KOHYA, KOHYA | {"x.alpha": torch.tensor(2.0)}]), "mismatch: 'x.alpha'"),
        (lambda: adapters.resize(ONE, 0), "argument: rank="),
        (lambda: adapters.resize(ONE, {"z": 1}), "name: rank"),
        (lambda: adapters.resize(ONE, 1, how="half"), "argument"),
        (lambda: adapters.resize(ONE | {"x.lora_B.weight": torch.full((3, 2), torch.nan)}, 1), "values: 'x'"),
        (lambda: adapters.stack([]), "argument"),
        (lambda: adapters.stack([ONE, ONE], [1]), "argument"),
        (lambda: adapters.stack([ONE, ONE], [0, 0]), "argument"),
        (lambda: adapters.stack([ONE, ONE], [1, -1]), "argument: add_weighted_adapter"),
        (lambda: adapters.stack([ONE, OTHER]), "mismatch"),
        (lambda: adapters.rank_of(UNEQUAL), "mismatch"),
    ],
)
def test_rank__what_is_refused(call, expected):
    with refused(expected):
        call()


def test_rank__an_adapter_without_rows_grows_into_a_new_one():
    none = {"fc.lora_A.weight": torch.zeros(0, 4), "fc.lora_B.weight": torch.zeros(3, 0)}
    new = adapters.resize(none, 2, how="truncate", generator=torch.Generator().manual_seed(0)).state
    expected = torch.empty(2, 4).uniform_(-0.5, 0.5, generator=torch.Generator().manual_seed(0))
    assert torch.equal(new["fc.lora_A.weight"], expected)
    assert torch.equal(new["fc.lora_B.weight"], torch.zeros(3, 2))
