"""Blocks compute what their papers draw, and the right gradients of it."""

from itertools import product

import pytest
import torch
from refusals import zoo_refused
from torch import nn
from torch.func import functional_call

from zoo import Spec
from zoo.layers import Builder
from zoo.resnet import BasicBlock, Bottleneck, PreBasicBlock, PreBottleneck, make_shortcut


def check_gradients(module, *shape):
    """By finite differences, of the input and of all parameters, in training mode."""
    module = module.double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.5 + 0.1)
    names, parameters = zip(*module.named_parameters())
    x = torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
    state = dict(module.named_buffers())

    def run(x, *parameters):
        copied = {key: tensor.clone() for key, tensor in state.items()}
        return functional_call(module, dict(zip(names, parameters)) | copied, (x,))

    assert torch.autograd.gradcheck(run, (x, *parameters), fast_mode=True)


def test_blocks__resolutions_of_small_images():
    """A stride of 1 in the stem and in the first stage of two strides, as usual on CIFAR."""
    net, found = Spec("mobilenetv2", 10, width=0.1, depth=1, stem="cifar").build().eval(), []
    for part, module in net.named_children():
        if part.startswith("section"):
            module.register_forward_hook(lambda module, given, out: found.append(out.shape[-1]))
    net(torch.randn(1, 3, 32, 32))
    assert found == [32, 32, 16, 8, 8, 4, 4]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("block", "shortcut"),
    [*product((BasicBlock, Bottleneck), ("projection", "pad")),
     *product((PreBasicBlock, PreBottleneck), ("activated", "raw"))],
)  # fmt: skip
def test_blocks__gradients_of_residual_blocks(block, shortcut, stride):
    check_gradients(block(2, 2, stride, Builder(step_size=True, rate=0.5, scaler=True), shortcut), 3, 2, 4, 4)


@pytest.mark.parametrize("name", ["resnet18", "preresnet18"])
@pytest.mark.parametrize(("stem", "stride"), [("imagenet", 4), ("cifar", 1)])
def test_blocks__the_stem_of_large_images_pools(name, stem, stride):
    """A convolution of 7x7 and stride 2, and a pool of 3x3 and stride 2, or a convolution of 3x3 alone."""
    net = Spec(name, 10, width=0.1, depth=1, stem=stem, image_size=32).build()
    x = torch.randn(2, 3, 32, 32)
    expected = net.stem.conv(x)
    if name == "resnet18":
        expected = net.stem.norm(expected).relu()
    if stem == "imagenet":
        expected = torch.nn.functional.max_pool2d(expected, 3, 2, 1)
    torch.testing.assert_close(net.stem(x), expected)
    assert net.stem(x).shape[-1] == 32 // stride


@pytest.mark.parametrize(
    ("name", "section"), [("mobilenetv2", 2), ("efficientnetv2_cifar", 2), ("efficientnetv2_cifar", 4)]
)
def test_blocks__gradients_of_inverted_residuals(name, section):
    quiet = {"drop_path": 0} if name.startswith("efficientnet") else {}
    net = Spec(name, width=1e-9, rounding="ceil", depth=2, stem="cifar", **quiet).build()
    blocks = getattr(net, f"section{section}")
    check_gradients(nn.Sequential(*blocks), 3, 1, 4, 4)


@pytest.mark.parametrize("name", ["transformer", "transformer_masked"])
def test_blocks__gradients_of_a_transformer_s_block(name):
    net = Spec(name, 11, tokens=6, width=0.02, depth=1, dropout=0.0).build()
    check_gradients(net.section1[0], 2, 3, 8)


def test_blocks__a_causal_model_does_not_see_what_comes():
    for name, expected in (("transformer", True), ("transformer_masked", False)):
        model = Spec(name, 11, tokens=6, width=0.1, depth=2, dropout=0.0).build()
        x = torch.randint(11, (2, 6), generator=torch.Generator().manual_seed(0))
        y = x.clone()
        y[:, 4] = (y[:, 4] + 1) % 11
        with torch.no_grad():
            a, b = model.eval()(x), model(y)
        assert torch.allclose(a[:, :4], b[:, :4]) == expected
        assert not torch.allclose(a[:, 4:], b[:, 4:])


def test_blocks__sequences_longer_than_the_positions_are_refused():
    spec = Spec("transformer", 11, tokens=6, width=0.1, depth=2)
    model = spec.build()
    assert model(spec.example(2, size=3)).shape == (2, 3, 11)
    with pytest.raises(AssertionError, match="longer than the 6 tokens"):
        model(spec.example(2, size=7))


@pytest.mark.parametrize(("stride", "outputs"), [(1, 2), (2, 4), (2, 1)])
def test_blocks__the_padded_shortcut_is_what_the_paper_draws(stride, outputs):
    """Option A: every second pixel and zero channels appended; a section that is narrower takes the first."""
    block = BasicBlock(2, outputs, stride, Builder("none"), "pad")
    x = torch.rand(1, 2, 6, 6)
    side = 6 // stride
    shortcut = torch.zeros(1, outputs, side, side)
    kept = min(2, outputs)
    shortcut[:, :kept] = x[:, :kept, ::stride, ::stride]
    expected = torch.relu(block.conv2(torch.relu(block.conv1(x))) + shortcut)
    torch.testing.assert_close(block(x), expected)


@pytest.mark.parametrize("shortcut", ["activated", "raw"])
@pytest.mark.parametrize("block", [PreBasicBlock, PreBottleneck])
def test_blocks__pre_activation_blocks_are_what_the_paper_draws(block, shortcut):
    """ReLU before each convolution, none after the sum; the projection sees the input with or without it."""
    block = block(2, 4, 2, Builder("none"), shortcut)
    x = torch.randn(3, 2, 6, 6)
    out = x
    for conv in [m for name, m in block.named_children() if name.startswith("conv")]:
        out = conv(torch.relu(out))
    projected = block.shortcut(torch.relu(x) if shortcut == "activated" else x)
    torch.testing.assert_close(block(x), out + projected)
    plain = type(block)(4 * block.expansion, 4, 1, Builder("none"), shortcut)
    y = torch.randn(3, 4 * block.expansion, 6, 6)
    out = y
    for conv in [m for name, m in plain.named_children() if name.startswith("conv")]:
        out = conv(torch.relu(out))
    torch.testing.assert_close(plain(y), y + out)


def test_blocks__an_unknown_shortcut_is_refused_even_if_none_is_needed():
    for inputs in (2, 4):
        with zoo_refused("argument: 'projektion'"):
            make_shortcut(Builder(), inputs, 4, 1, "projektion")
