"""Where a smaller model lies in a larger one: planted ones are found, and what is no smaller model is refused."""

import copy
from itertools import pairwise

import pytest
import timm
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from surgery import SurgeryError, average, corner, fit, graft, load, narrow, permute, state, ungraft, widths

pytestmark = pytest.mark.slow
IMAGE = torch.zeros(1, 3, 32, 32)


def shuffled(model, example, seed):
    """The model in another order."""
    draw = torch.Generator().manual_seed(seed)
    orders = {w.name: torch.randperm(w.size, generator=draw) for w in widths(model, example=example) if not w.order}
    return permute(model, orders, example=example)[0]


def check_found(large, small, example, starts=1):
    plan = fit(large, small, example=example, starts=starts)
    found = plan.extract(state(large))
    values = small if isinstance(small, dict) else state(small)
    assert all(torch.equal(tensor, found[name]) for name, tensor in values.items())
    ones = {name: torch.ones_like(tensor) for name, tensor in found.items()}
    assert all(torch.equal(t, ones[n]) for n, t in plan.extract(plan.embed(ones)[0]).items())
    return plan


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "mobilenetv3_small_050"])
def test_a_planted_model_is_found(name):
    torch.manual_seed(0)
    large = timm.create_model(name, num_classes=7).eval()
    for norm in large.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.weight.data.uniform_(0.5, 1.5)
    small, _ = narrow(large, rate=0.5, example=IMAGE)
    plan = check_found(shuffled(large, IMAGE, 1), small, IMAGE)
    torch.testing.assert_close(plan.build(shuffled(large, IMAGE, 1))(IMAGE + 1), small(IMAGE + 1))


@pytest.mark.slow
@pytest.mark.parametrize("heads", ["inside", "drop"])
def test_a_planted_transformer_is_found_with_its_heads(heads):
    torch.manual_seed(0)
    large = timm.models.VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=4).eval()
    shallow, _ = ungraft(large, keep=[2], stands_for="none", example=IMAGE)
    small, _ = narrow(shallow, rate=0.5, heads=heads, example=IMAGE)
    plan = check_found(shuffled(large, IMAGE, 1), small, IMAGE)
    other = plan.build(shuffled(large, IMAGE, 1))
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(other(x), small(x), rtol=1e-4, atol=1e-4)
    if heads == "inside":  # a state does not tell heads: all of them stay
        check_found(shuffled(large, IMAGE, 2), state(small), IMAGE)


def chain(*sizes):
    layers = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def apart(one, other):
    return sum((one[name] - tensor).square().sum().item() for name, tensor in other.items())


@pytest.mark.slow
@settings(max_examples=25)
@given(seed=st.integers(0, 10**6), sizes=st.tuples(*[st.integers(1, 6)] * 2))
def test_what_is_found_matches_at_least_as_well_as_the_corner(seed, sizes):
    torch.manual_seed(seed)
    large, small, x = chain(5, 6, 6, 5), chain(5, *sizes, 5), torch.zeros(1, 5)
    plan, (leading, _) = fit(large, small, example=x), corner(large, small)
    values = state(small)
    assert apart(plan.extract(state(large)), values) <= apart(state(leading), values) + 1e-5
    again = fit(large, small, example=x, starts=3, generator=torch.Generator().manual_seed(seed))
    assert apart(again.extract(state(large)), values) <= apart(plan.extract(state(large)), values) + 1e-5
    full, mask = plan.embed(values, into=large)
    assert all(torch.equal(t, full[n][~mask[n]]) for n, t in ((n, t[~mask[n]]) for n, t in state(large).items()))
    assert all(torch.equal(t, values[n]) for n, t in plan.extract(full).items())


def test_what_is_no_smaller_model_is_refused():
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
    x = torch.zeros(1, 2)
    wide = nn.Sequential(nn.Linear(2, 5), nn.ReLU(), nn.Linear(5, 3))
    for small, why in [
        (wide, "more than"),
        (state(wide), "more than"),
        (nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)), "no choice of them"),
        (nn.Sequential(nn.Linear(2, 4)), "only the large model has a tensor '2.weight'"),
        (3, "the small model"),
    ]:
        with pytest.raises(SurgeryError, match=why):
            fit(net, small, example=x)
    block = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    blocks = nn.Sequential(nn.Linear(2, 4), copy.deepcopy(block), copy.deepcopy(block), nn.Linear(4, 3))
    deeper, _ = graft(blocks, depths=[3])
    with pytest.raises(SurgeryError, match="more blocks"):
        fit(blocks, deeper, example=x)


@pytest.mark.slow
def test_trained_models_of_unequal_width_merge_better_where_they_match():
    from sklearn.datasets import load_digits

    data, target = (torch.tensor(a) for a in load_digits(return_X_y=True))
    data = data.float() / 16

    def trained(width, seed):
        torch.manual_seed(seed)
        net = chain(64, width, width, width, 10)
        optimizer = torch.optim.Adam(net.parameters(), 3e-3)
        for batch in torch.randint(1400, (400, 64)):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(data[batch]), target[batch]).backward()
            optimizer.step()
        return net

    def accuracy(values):
        return (load(copy.deepcopy(large), values)(data[1400:]).argmax(1) == target[1400:]).float().mean().item()

    large, small = trained(256, 0), trained(192, 1)
    merged = {}
    for name, plan in {"corner": corner(large, small)[1], "fit": fit(large, small, example=data[:1])}.items():
        mean = average([plan.extract(state(large)), state(small)])
        merged[name] = accuracy(plan.embed(mean, into=large)[0])
    assert merged["fit"] > merged["corner"] + 0.02, merged


def vit(width, heads, depth=1):
    torch.manual_seed(width + heads)
    return timm.models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=width, depth=depth, num_heads=heads, num_classes=5
    )


@pytest.mark.parametrize(("large", "small"), [((32, 4), (32, 8)), ((32, 4), (16, 1)), ((64, 8), (32, 2))])
def test_other_heads_are_no_part(large, small):
    with pytest.raises(SurgeryError, match="give a narrower model of the family"):
        fit(vit(*large), vit(*small), example=IMAGE)


def test_a_state_does_not_tell_heads(caplog):
    small, _ = narrow(vit(32, 4), rate=0.5, heads="drop", example=IMAGE)
    fit(vit(32, 4), state(small), example=IMAGE)
    assert "a state does not tell heads: all 4 of blocks.0.attn.proj.weight:1:0 stay" in caplog.text


def test_a_width_of_which_the_state_does_not_hold_all_keeps_its_order():
    class Scaled(nn.Module):
        def __init__(self, n):
            super().__init__()
            self.first, self.second = nn.Linear(5, n), nn.Linear(n, 3)
            self.register_buffer("scale", torch.arange(1.0, n + 1), persistent=False)

        def forward(self, x):
            return self.second(self.first(x).relu() * self.scale)

    torch.manual_seed(0)
    large, small, x = Scaled(6), Scaled(6), torch.randn(4, 5)
    plan = fit(large, small, example=x)
    laid = load(large, plan.embed(small, into=large)[0])
    torch.testing.assert_close(laid(x), small(x))


def test_a_model_without_weights_is_refused():
    with pytest.raises(SurgeryError, match="no weights to compare"):
        fit(chain(2, 3, 1), chain(2, 2, 1).to("meta"), example=torch.zeros(1, 2))
