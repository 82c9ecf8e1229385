"""A smaller model of a name has a subset of the larger one's tensors, each the leading corner of the larger one's."""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import some
from zoo_models import FAMILIES, inputs, shapes, sized, takes

import surgery
import zoo
from zoo import Spec


def random(model):
    """No tensor is constant, so that a wrong slice shows."""
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name, tensor in model.state_dict().items():
        positive = name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight"))
        draw = torch.rand if positive else torch.randn
        size = 1.0 if positive else (2 / tensor[0].numel()) ** 0.5
        state[name] = 0.5 * positive + size * draw(tensor.shape, generator=generator)
    return state


def logits(model, spec):
    """Of two random inputs; finite, and not the same twice."""
    with torch.no_grad():
        out = model.eval()(inputs(spec, batch=2, seed=2))
    assert out.isfinite().all()
    assert not torch.allclose(out[0], out[1])
    return out


def leading(small, large):
    """The corners of the large state, written out."""
    return {name: large[name][tuple(slice(n) for n in tensor.shape)] for name, tensor in small.items()}


def assert_nested(small, large):
    small, large = small.state_dict(), large.state_dict()
    assert small.keys() <= large.keys()
    for name, tensor in small.items():
        assert tensor.ndim == large[name].ndim
        assert all(a <= b for a, b in zip(tensor.shape, large[name].shape, strict=True)), name


@st.composite
def nested_pairs(draw, name):
    """(small, large): a part's rate and a section's depth are never larger in the small one."""
    architecture = Spec(name).architecture
    rates, slots, sections = st.floats(0.02, 2), len(architecture.rate_names), len(architecture.depth)
    if draw(st.booleans()):
        widths = sorted((draw(rates), draw(rates)))
    else:
        pairs = [sorted((draw(rates), draw(rates))) for _ in range(slots)]
        widths = list(zip(*pairs))
    depths = [sorted((draw(st.integers(1, 4)), draw(st.integers(1, 4)))) for _ in range(sections)]
    if draw(st.booleans()):
        depths = [(d, d) for _, d in depths]
    options = shapes(name) | {"rounding": draw(st.sampled_from(["ceil", "divisor8"]))}
    if "step_size" in architecture.defaults:
        options["step_size"] = draw(st.booleans())
    return [Spec(name, width=w, depth=d or None, **options) for w, d in zip(widths, list(zip(*depths)) or [None] * 2)]


NESTED = [
    "cnn", "resnet50", "resnet20", "preresnet18", "mobilenetv2", "vgg11", "vit_tiny", "transformer",
]  # fmt: skip


@pytest.mark.parametrize("name", some(zoo.names(), NESTED))
def test_nesting__smaller_models_lie_in_larger_ones(name):
    @settings(max_examples=4)
    @given(nested_pairs(name))
    def check(pair):
        small, large = (spec.build(device="meta") for spec in pair)
        assert_nested(small, large)
        if pair[0].depth == pair[1].depth:
            assert list(small.state_dict()) == list(large.state_dict())

    check()


@pytest.mark.parametrize("norm", ["static_batch", "group", "layer", "none"])
def test_nesting__with_other_norms_too(norm):
    for name in takes("norm"):
        large = Spec(name, norm=norm, **shapes(name))
        assert_nested(large.scale(0.3, depth=large.depth and 1).build(device="meta"), large.build(device="meta"))


STEPPING = [name for name in zoo.names() if "step_size" in Spec(name).architecture.defaults]


@pytest.mark.parametrize("name", some(STEPPING, [name for name in STEPPING if name in NESTED]))
def test_nesting__residual_branches_do_not_depend_on_rounding(name):
    """Widths that happen to be equal make no shortcut, which a step size would show."""
    spec = Spec(name, step_size=True, **shapes(name))
    full = list(spec.build(device="meta").state_dict())
    assert any(key.endswith(".step") for key in full)
    for rounding in ("ceil", "divisor8"):
        narrow = dataclasses.replace(spec, width=1e-9, rounding=rounding)
        assert list(narrow.build(device="meta").state_dict()) == full


SECTIONED = [name for name in FAMILIES if name not in ("cnn", "lenet")]


@pytest.mark.parametrize("name", some(FAMILIES, [name for name in FAMILIES if name in NESTED]))
def test_nesting__corners_of_the_large_weights_run_in_the_small_model(name):
    spec = Spec(name, **shapes(name) | sized(name))
    large, small = spec.build(), spec.scale(0.6).build()
    assert any(a.shape != b.shape for a, b in zip(small.parameters(), large.parameters(), strict=True))
    state = random(large)
    small.load_state_dict(leading(small.state_dict(), state), strict=True)
    logits(small, spec)


@pytest.mark.parametrize("name", some(FAMILIES, ["cnn", "resnet20", "mobilenetv2", "transformer", "vit_tiny"]))
def test_narrow__surgery_relates_widths_by_reference(name):
    spec = Spec(name, **shapes(name) | sized(name))
    large, small = spec.build(), spec.scale(0.6).build()
    large.load_state_dict(random(large))
    narrow, plan = surgery.narrow(large, like=small)
    part = plan.extract(large.state_dict())
    expected = leading(small.state_dict(), large.state_dict())
    assert list(part) == list(small.state_dict())
    assert all(torch.equal(part[key], expected[key]) for key in expected)
    x = random(small)
    back = plan.extract(plan.embed(x)[0])
    assert all(torch.equal(back[key], x[key]) for key in x)
    small.load_state_dict(part)
    assert torch.equal(logits(narrow, spec), logits(small, spec))


@pytest.mark.parametrize("name", some(SECTIONED, ["resnet20", "mobilenetv2", "transformer"]))
def test_ungraft__surgery_relates_depths(name):
    """The shallow model that surgery cuts out is the one that the zoo builds."""
    deep = tuple(min(3, d + 1) for d in Spec(name).depth)
    shallow = tuple(range(1, 3)) * 4
    spec = Spec(name, depth=deep, **shapes(name) | sized(name))
    small = spec.scale(depth=tuple(min(a, b) for a, b in zip(shallow, deep)))
    assert small.depth != deep
    large = spec.build()
    large.load_state_dict(random(large))
    cut, plan = surgery.ungraft(large, keep=small.depth)
    part, model = plan.extract(large.state_dict()), small.build()
    model.load_state_dict(part, strict=True)
    assert all(torch.equal(part[key], large.state_dict()[key]) for key in part)
    back = plan.extract(plan.embed(part)[0])
    assert all(torch.equal(back[key], part[key]) for key in part)
    assert torch.equal(logits(cut, spec), logits(model, spec))


def found(model):
    return [(section.name, len(section.blocks)) for section in surgery.sections(model)]


@pytest.mark.parametrize("name", some(zoo.names(), NESTED))
def test_nesting__sections_are_found(name):
    full = Spec(name).depth
    count = len(full)
    depths = {full, (1,) * count, (2,) * count, tuple(i % 3 + 1 for i in range(count))}
    for depth in sorted(depths) if count else [None]:
        model = Spec(name, depth=depth, **shapes(name)).build(device="meta")
        expected = [(f"section{i}", d) for i, d in enumerate(depth or (), start=1)]
        assert found(model) == expected
        assert found(model.state_dict()) == expected
    assert found(Spec(name, width=0.1, **shapes(name)).build(device="meta")) == [
        (f"section{i}", d) for i, d in enumerate(full, start=1)
    ]


@pytest.mark.parametrize("name", some(FAMILIES, ["cnn", "resnet20", "transformer"]))
def test_narrow__narrowing_any_module_by_half_gives_the_zoo_s_half(name):
    spec = Spec(name, width=0.5, rounding="ceil", **shapes(name))
    half = spec.scale(0.5).build(device="meta").state_dict()
    _, plan = surgery.narrow(spec.build(), 0.5, spec.example(2))
    for key, tensor in half.items():
        if name == "resnet20_fedmr" and key.startswith("tail"):
            continue  # no forward pass shows that norm
        assert plan.small_shapes[key] == tuple(tensor.shape), key
        if name != "resnet20":  # where shortcuts append channels, the first half is taken of those and of these
            (source,) = plan.entries[key]
            assert all(runs is None or (len(runs), runs[0][0]) == (1, 0) for runs in source.index), key


@settings(max_examples=10)
@given(st.floats(0.02, 0.6), st.booleans(), st.integers(0, 100))
def test_nesting__a_narrow_transformer_has_the_leading_channels_of_every_head(rate, causal, seed):
    """The wide q, k and v as (channel, head): a narrow head's channels are the first of the same head."""
    name = "transformer" if causal else "transformer_masked"
    spec = Spec(name, width=0.5, depth=1, dropout=0, num_classes=11, tokens=6)
    wide, narrow = spec.build(torch.Generator().manual_seed(seed)), spec.scale(rate).build()
    narrow.load_state_dict(leading(narrow.state_dict(), wide.state_dict()))
    wide, narrow = (model.section1[0].attention for model in (wide, narrow))
    heads, size = 8, narrow.q.out_features // 8
    total = size * heads  # channels that the narrow model has, of the residual stream too
    x = torch.randn(2, 6, total, generator=torch.Generator().manual_seed(seed))

    def by_head(linear, head):
        weight = linear.weight.reshape(-1, heads, wide.q.in_features)[:size, head, :total]
        return F.linear(x, weight, linear.bias.reshape(-1, heads)[:size, head])

    mixed = torch.empty(2, 6, size, heads)
    hidden = torch.full((6, 6), -torch.inf).triu(1) if causal else torch.zeros(6, 6)
    for head in range(heads):
        q, k, v = (by_head(linear, head) for linear in (wide.q, wide.k, wide.v))
        weights = (q @ k.mT / size**0.5 + hidden).softmax(-1)
        mixed[..., head] = weights @ v
    expected = F.linear(mixed.flatten(2), wide.out.weight[:total, :total], wide.out.bias[:total])
    assert total < wide.q.in_features
    torch.testing.assert_close(narrow(x), expected)


EXITS = [name for name in zoo.names() if "exits" in Spec(name).architecture.defaults]


@pytest.mark.parametrize("name", some(EXITS, ["resnet18", "preresnet20", "resnet20_fedmr"]))
def test_nesting__a_model_with_exits_classifies_after_each_section(name):
    """... as the models that end there do, and predicts with the mean."""
    spec = Spec(name, **shapes(name) | {"width": 0.1, "exits": True, "norm": "group"})
    net, x, count = spec.build().train(), inputs(spec, batch=2), len(spec.depth)
    net.load_state_dict(random(net))
    with torch.no_grad():
        exits = net(x)
        assert exits.shape == (2, count, 5)
        torch.testing.assert_close(net.eval()(x), exits.mean(1))
        for last in range(1, count + 1):
            plain = dataclasses.replace(spec, exits=False).build()
            names = [*plain._modules][: last + 1]
            begun = torch.nn.Sequential(*(getattr(net, part) for part in names))
            torch.testing.assert_close(getattr(net, f"exit{last}")(begun(x)), exits[:, last - 1])
            short = dataclasses.replace(spec, depth=spec.depth[:last] + (0,) * (count - last)).build()
            short.load_state_dict({key: net.state_dict()[key] for key in short.state_dict()})
            torch.testing.assert_close(short(x), exits[:, :last])
        assert torch.equal(net[:2](x), net.section1(net.stem(x)))
    assert "head.weight" in dataclasses.replace(spec, exits=False).build().state_dict()
    assert spec.build()[:3].state_dict().keys() <= net.state_dict().keys()


def test_nesting__without_other_sections_its_one_exit_is_the_head():
    """The model that ends after its first section is a model with one classifier."""
    net = Spec("preresnet20", exits=True, depth=(2, 0, 0), norm="group").build().eval()
    assert [name for name, _ in net.named_children()] == ["stem", "section1", "exit1"]
    x = torch.randn(2, 3, 8, 8)
    hidden = F.relu(net.exit1.tail.norm(net.section1(net.stem(x)))).mean((2, 3))
    torch.testing.assert_close(net(x), F.linear(hidden, net.exit1.head.weight, net.exit1.head.bias))


def test_narrow__surgery_finds_the_sections_and_widths_of_a_model_with_exits():
    spec = Spec("resnet18", exits=True, depth=(2, 1, 2, 0), **shapes("resnet18") | {"width": 0.5})
    net = spec.build()
    assert found(net) == [("section1", 2), ("section2", 1), ("section3", 2)]
    half = spec.scale(0.5).build(device="meta").state_dict()
    for mode in (True, False):
        _, plan = surgery.narrow(net.train(mode), 0.5, spec.example(2))
        assert plan.small_shapes == {key: tuple(tensor.shape) for key, tensor in half.items()}
