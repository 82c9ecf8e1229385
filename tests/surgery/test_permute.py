"""Permuted models compute what they did, and permuting by the inverse gives every bit back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from library_models import LIBRARY_MODELS, library_model
from symmetric import IMAGE, SMALL, Grouped, image, randomized, same_outputs
from torch import nn

from surgery import SurgeryError, importance, narrow, permute, sort_by, state, widths


def movable(net, example, output=None):
    return {width.name: width for width in widths(net, example=example) if not width.order}


def shuffled(found, seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randperm(width.size, generator=generator) for name, width in found.items()}


def check(net, example, x, seed):
    found = movable(net, example)
    assert found
    orders = shuffled(found, seed)
    other, plan = permute(net, orders, example=example)
    assert same_outputs(net, other, x)
    assert any(not torch.equal(a, b) for a, b in zip(state(net).values(), state(other).values()))
    extracted = plan.extract(state(net))
    assert all(torch.equal(tensor, extracted[name]) for name, tensor in state(other).items())
    back, inverse = permute(other, {name: order.argsort() for name, order in orders.items()}, example=example)
    assert all(torch.equal(a, b) for a, b in zip(state(net).values(), state(back).values()))
    return plan, inverse


@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_outputs_stay_and_the_inverse_gives_every_bit_back(name, seed):
    plan, inverse = check(randomized(SMALL[name](), seed), IMAGE.double(), image(seed=seed), seed)
    assert all(s[0].index == (None,) * len(s[0].index) for s in plan.compose(inverse).entries.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARY_MODELS)
def test_models_of_libraries(name):
    net, example = library_model(name)
    check(net, example, example, 0)


def test_heads_and_groups_are_widths_of_their_own():
    found = {w.name: w for w in widths(SMALL["attention"](), example=IMAGE) if not w.order}
    assert {(w.size, w.grouping) for w in found.values()} == {(8, ""), (2, "heads"), (4, ""), (12, "")}
    net = randomized(SMALL["attention"]())
    heads = next(name for name, w in found.items() if w.grouping)
    other, _ = permute(net, {heads: [1, 0]}, example=IMAGE.double())
    assert torch.equal(other.proj.weight, net.proj.weight[:, [4, 5, 6, 7, 0, 1, 2, 3]])
    assert torch.equal(other.qkv.bias.view(3, 2, 4), net.qkv.bias.view(3, 2, 4)[:, [1, 0]])


def test_a_width_has_a_name_for_every_axis_of_its_own():
    net = randomized(SMALL["residual"]())
    one, _ = permute(net, {"norm1.bias:0": [3, 2, 1, 0]}, example=IMAGE.double())
    other, _ = permute(net, {"conv1.weight:0": [3, 2, 1, 0]}, example=IMAGE.double())
    assert all(torch.equal(a, b) for a, b in zip(state(one).values(), state(other).values()))
    with pytest.raises(SurgeryError, match="under another name already"):
        permute(net, {"norm1.bias:0": [3, 2, 1, 0], "conv1.weight:0": [0, 1, 2, 3]}, example=IMAGE.double())


class Told(nn.Module):
    """Widths whose positions are told apart, each in a way of its own."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 6) for _ in range(4))
        self.weights = [torch.arange(6.0)]  # no buffer, so that no operation of ours can reach it
        self.head = nn.Linear(24, 2)

    def forward(self, x):
        ranked = self.a(x) * torch.arange(6.0, device=x.device)
        summed = self.b(x).cumsum(-1)
        listed = self.c(x) * self.weights[0].to(x.device)
        mixed = self.d(x) * torch.hann_window(6, device=x.device)
        return self.head(torch.cat([ranked, summed, listed, mixed], -1))


class Mixed(nn.Sequential):
    def forward(self, x):
        y = self[0](x)
        return self[1](y @ torch.eye(y.shape[-1], device=x.device, dtype=x.dtype))


def test_an_identity_matrix_has_no_order():
    net, x = randomized(Mixed(nn.Linear(4, 6), nn.Linear(6, 2)).double()), torch.randn(3, 4, dtype=torch.float64)
    other, _ = permute(net, {"0.bias:0": [3, 5, 1, 0, 2, 4]}, example=x)
    torch.testing.assert_close(other(x), net(x), rtol=0, atol=1e-12)
    assert not torch.equal(other[0].bias, net[0].bias)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a.bias:0", "a window or a range runs over it"),
        ("b.bias:0", "depends on the order"),
        ("c.bias:0", "register it as a buffer"),
        ("d.bias:0", "a window or a range runs over it"),
        ("a.weight:1", "an axis of the input"),
        ("head.bias:0", "an axis of the output"),
        ("head.weight:1", "several widths lie along it: did you mean 'head.weight:1:0'"),
        ("f.bias:0", "the model has no such width"),
    ],
)
def test_what_has_an_order_is_refused_with_the_reason(name, why):
    with pytest.raises(SurgeryError, match=why):
        permute(Told(), {name: [1, 0, 2, 3, 4, 5]}, example=torch.zeros(1, 4))


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 0, 1, 2], [0.5, 1, 2, 3], "0123", None, [True, False, True, False]])
def test_what_is_no_permutation_is_refused(order):
    with pytest.raises(SurgeryError, match="permutation of"):
        permute(SMALL["residual"](), {"norm1.bias:0": order}, example=IMAGE)


@pytest.mark.parametrize("name", SMALL)
def test_the_first_positions_of_a_sorted_model_are_the_best_of_the_model(name):
    net, x = randomized(SMALL[name]()), image()
    scores = importance(net, example=x, by="l2")
    ordered, _ = sort_by(net, scores, example=x)
    assert same_outputs(net, ordered, x)
    for rate in (0.34, 0.5):
        best, _ = narrow(net, rate=rate, example=x, keep_top=scores)
        first, _ = narrow(ordered, rate=rate, example=x)
        assert same_outputs(best, first, x)
    assert not same_outputs(narrow(net, rate=0.5, example=x)[0], first, x)


def test_plans_of_models_without_weights():
    with torch.device("meta"):
        net = Grouped()
    other, plan = permute(net, {"norm.bias:0:0": [2, 0, 1]}, example=IMAGE)
    assert other.stem.weight.is_meta
    assert plan.entries["stem.bias"][0].index == (((8, 12), (0, 8)),)
