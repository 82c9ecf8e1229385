from collections import Counter

import pytest
import timm
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from selection import some
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import surgery
import zoo


def assert_covers(model, pieces):
    """Every tensor of the state exactly once."""
    names = [name for layer in pieces for name in layer.tensors]
    assert Counter(names) == Counter(list(surgery.state(model)))


@st.composite
def random_nets(draw, depth=2):
    """Sequentials of linear, norm, activation and nested layers, at times with a shared module or bare parameter."""
    features = 4
    members = []
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["linear", "norm", "relu", "nested", "shared", "bare"]))
        if kind == "nested" and depth:
            members.append(draw(random_nets(depth=depth - 1)))
        elif kind == "shared" and members:
            members.append(members[0])
        elif kind == "bare":
            module = nn.Linear(features, features)
            module.scale = nn.Parameter(torch.ones(1))
            module.child = nn.BatchNorm1d(features)
            members.append(module)
        else:
            members.append(
                {"norm": nn.BatchNorm1d(features), "relu": nn.ReLU()}.get(kind, nn.Linear(features, features))
            )
    return nn.Sequential(*members)


@given(random_nets())
def test_layers__hold_every_tensor_exactly_once_in_random_nets(net):
    for unit in ("layer", "tensor"):
        assert_covers(net, surgery.layers(net, unit=unit))


MODELS = """torchvision:resnet50 torchvision:mobilenet_v2 torchvision:efficientnet_v2_s torchvision:vit_b_16
    torchvision:convnext_tiny torchvision:swin_t timm:resnet18 timm:vit_tiny_patch16_224 timm:convnext_atto
    timm:mobilenetv3_small_050 timm:beit_base_patch16_224"""


QUICK = """torchvision:resnet50 torchvision:vit_b_16 torchvision:convnext_tiny torchvision:swin_t
    timm:mobilenetv3_small_050 timm:beit_base_patch16_224"""


@pytest.mark.parametrize("name", some(MODELS.split(), QUICK.split()))
def test_layers__cover_models_of_libraries_without_data(name):
    with torch.device("meta"):
        model = surgery.libraries.make_model(name)
    for unit in ("layer", "block", "tensor"):
        assert_covers(model, surgery.layers(model, unit=unit))


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("resnet50", {"Bottleneck": 16}),
        ("mobilenet_v2", {"InvertedResidual": 17}),
        ("efficientnet_v2_s", {"MBConv": 30, "FusedMBConv": 10}),  # not their squeeze-and-excitation modules
        ("convnext_tiny", {"CNBlock": 18}),
        ("vit_b_16", {"EncoderBlock": 12}),
        ("swin_t", {"SwinTransformerBlock": 12}),
        ("resnet10", {"BasicBlock": 4}),  # whose sections have a single block
    ],
)
def test_layers__blocks_are_the_residual_blocks_of_the_papers(name, blocks):
    with torch.device("meta"):
        of_resnet = torchvision.models.resnet
        ten = name == "resnet10"
        model = of_resnet.ResNet(of_resnet.BasicBlock, [1] * 4) if ten else torchvision.models.get_model(name)
    kinds = Counter(layer.kind for layer in surgery.layers(model, unit="block"))
    assert {kind: n for kind, n in kinds.items() if kind in blocks} == blocks
    assert max(len(layer.tensors) for layer in surgery.layers(model, unit="block") if layer.kind not in blocks) <= 5


def test_layers__a_model_without_blocks_says_so():
    with refused("unsupported"):
        surgery.layers(zoo.create("cnn"), unit="block")
    with refused("argument"):
        surgery.layers(zoo.create("cnn"), unit="channel")


def test_layers__a_norm_travels_with_its_statistics():
    pieces = {layer.name: layer for layer in surgery.layers(torchvision.models.resnet18())}
    names = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert pieces["bn1"].tensors == tuple(f"bn1.{name}" for name in names)
    assert pieces["bn1"].kind == "BatchNorm2d"


def test_layers__a_parametrized_module_stays_whole():
    net = nn.Sequential(weight_norm(nn.Linear(3, 3)), nn.Linear(3, 1))
    first, second = surgery.layers(net)
    assert (first.name, len(first.tensors), second.tensors) == ("0", 3, ("1.weight", "1.bias"))


def test_layers__a_parametrized_root_does_not_swallow_its_children():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

    net = Net()
    nn.utils.parametrize.register_parametrization(net, "scale", nn.Identity())
    pieces = surgery.layers(net)
    assert_covers(net, pieces)
    assert {layer.name for layer in pieces} == {"", "a", "b"}


def test_layers__bare_parameters_are_a_layer_of_their_own():
    model = timm.create_model("vit_tiny_patch16_224")
    root = surgery.layers(model)[0]
    assert root == ("", "VisionTransformer", ("cls_token", "pos_embed"))


def test_layers__with_an_example_layers_come_in_the_order_in_which_they_run():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.last, self.idle, self.first = nn.Linear(4, 2), nn.Linear(4, 4), nn.Linear(3, 4)

        def forward(self, x):
            return self.last(self.first(x))

    assert [layer.name for layer in surgery.layers(Net(), example=torch.zeros(1, 3))] == ["first", "last", "idle"]
