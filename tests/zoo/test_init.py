"""Initial weights: where they come from and how they are spread."""

import math

import pytest
import torch
from refusals import zoo_refused
from selection import some
from torch import nn
from zoo_models import FAMILIES, able, small, takes

import zoo


def draw(name, seed):
    return small(name).build(None if seed is None else torch.Generator().manual_seed(seed)).state_dict()


@pytest.mark.parametrize("name", some(FAMILIES, ["cnn", "resnet20", "mobilenetv2", "vit_tiny", "transformer"]))
def test_init__weights_come_from_the_generator_alone(name):
    before = torch.get_rng_state()
    a, other = draw(name, 1), draw(name, 2)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)  # the global generator does not matter
    b = draw(name, 1)
    assert a.keys() == b.keys() == other.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    matrices = [key for key, tensor in a.items() if tensor.ndim > 1]
    assert all(not torch.equal(a[key], other[key]) for key in matrices)


@pytest.mark.parametrize("name", ["cnn", "resnet20", "vit_tiny", "transformer"])
def test_init__weights_are_drawn_in_the_order_of_the_modules(name):
    """So that a seed gives the model that it gave to those who published with it."""
    drawn, net = draw(name, 1), small(name).build()
    generator = torch.Generator().manual_seed(1)
    for part in net.children():
        part.torch_init = net.torch_init
        zoo.initialise(part, generator)
    assert all(torch.equal(drawn[key], tensor) for key, tensor in net.state_dict().items())


def test_init__the_first_convolution_has_the_first_numbers():
    expected = torch.empty_like(drawn := draw("resnet20", 0)["stem.conv.weight"])
    expected.normal_(0, math.sqrt(2 / (9 * len(drawn))), generator=torch.Generator().manual_seed(0))
    assert torch.equal(drawn, expected)


@pytest.mark.parametrize("name", ["cnn", "resnet20", "transformer"])
def test_init__without_a_generator_weights_come_from_the_global_one(name):
    states = []
    for seed in (1, 1, None):
        if seed:
            torch.manual_seed(seed)  # which goes on for the third
        states.append(draw(name, None))
    assert all(torch.equal(states[0][key], tensor) for key, tensor in states[1].items())
    key = next(key for key, tensor in states[0].items() if tensor.ndim > 1)
    assert not torch.equal(states[0][key], states[2][key])


NORMS = ["batch", "static_batch", "group", "none"]
NORMED = [(name, norm) for name in FAMILIES for norm in (NORMS if name in takes("norm") else ["batch"])]


@pytest.mark.parametrize(("name", "norm"), some(NORMED, [(a, b) for a, b in NORMED if b == "batch" or a == "resnet20"]))
def test_init__every_weight_is_initialised(name, norm):
    """With rules that give finite, plausible numbers; memory as it was would not."""
    for key, tensor in small(name, **able(name, norm=norm, step_size=True)).build().state_dict().items():
        assert tensor.isfinite().all(), key
        assert tensor.abs().max() < 10, key
        if tensor.ndim > 1:
            assert tensor.unique().numel() > tensor.numel() // 2, key
        elif key.endswith(("norm.weight", "running_var", "add.step")):
            assert torch.equal(tensor, torch.ones_like(tensor)), key
        elif key.endswith(("norm.bias", "running_mean")):
            assert torch.equal(tensor, torch.zeros_like(tensor)), key


@pytest.mark.parametrize(
    "name", ["resnet18", "resnet50", "preresnet20", "mobilenetv2", "efficientnetv2_cifar", "vgg11"]
)
def test_init__convolutions_start_with_he_s_deviation_by_fan_out(name):
    """sqrt(2 / fan-out): of a depthwise one the fan-out is that of its group."""
    net = small(name, width=0.5, depth=1).build(torch.Generator().manual_seed(0))
    convolutions = [m for m in net.modules() if isinstance(m, nn.Conv2d) and m.weight.numel() > 200]
    assert len(convolutions) > 4
    for conv in convolutions:
        fan_out = conv.out_channels * conv.kernel_size[0] * conv.kernel_size[1] / conv.groups
        ratio = conv.weight.std().item() / math.sqrt(2 / fan_out)
        assert ratio == pytest.approx(1, abs=4 / math.sqrt(2 * conv.weight.numel()))
        assert conv.bias is None or not conv.bias.any()


@pytest.mark.parametrize("name", ["cnn", "vgg11", "vit_tiny", "transformer"])
def test_init__linear_layers_start_as_torch_s_do(name):
    net = small(name, width=0.3).build(torch.Generator().manual_seed(0))
    plain = nn.Linear | nn.Conv2d if name in ("cnn", "vit_tiny") else nn.Linear
    for module in net.modules():
        if isinstance(module, plain):
            bound = 1 / math.sqrt(module.weight[0].numel())
            assert 0.9 * bound < module.weight.abs().max() <= bound
            assert 0.5 * bound < module.bias.abs().max() <= bound


def test_init__a_module_without_a_rule_is_refused():
    with zoo_refused("unsupported"):
        zoo.initialise(nn.Sequential(nn.Linear(2, 2), nn.PReLU()))
