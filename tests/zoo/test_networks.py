"""Networks are classes that one calls, and the named architectures are rows of arguments for them."""

import copy
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from refusals import zoo_refused
from selection import some
from torch import nn

import zoo
from zoo import CNN, VGG, EfficientNetV2, LeNet, MobileNetV2, ResNet, Spec, Transformer, VisionTransformer
from zoo.mobilenet import Stage
from zoo.resnet import BasicBlock, Bottleneck, MultiExitResNet, PreBasicBlock, PreBottleneck
from zoo.spec import PRESETS

SMALL = {"num_classes": 5, "width": 0.25, "scaler": True}
STAGES = (
    Stage("fused", 1, 16, 1), Stage("fused", 4, 32, 2), Stage("fused", 4, 48, 2),
    Stage("squeezed", 4, 96, 2),
    Stage("squeezed", 6, 112, 1),
)  # fmt: skip
CALLED = {
    "cnn": lambda **options: CNN(**options),
    "lenet": lambda **options: LeNet(**options),
    "resnet18": lambda **options: ResNet(BasicBlock, [2, 2, 2, 2], [64, 128, 256, 512], **options),
    "resnet50": lambda **options: ResNet(Bottleneck, (3, 4, 6, 3), (64, 128, 256, 512), norm="group", **options),
    "resnet20": lambda **options: ResNet(BasicBlock, 3, [16, 32, 64], stem="cifar", shortcut="pad", **options),
    "preresnet20": lambda **options: ResNet(PreBasicBlock, 3, [16, 32, 64], stem="cifar", exits=True, **options),
    "resnet20_fedmr": lambda **options: ResNet(
        PreBottleneck, [2, 2, 2], [16, 32, 64], stem="cifar", shortcut="raw", final_norm=False, **options
    ),
    "mobilenetv2": lambda **options: MobileNetV2(step_size=True, **options),
    "efficientnetv2_cifar": lambda **options: EfficientNetV2(STAGES, [1, 2, 2, 3, 5], 16, 640, stem="cifar", **options),
    "vgg11": lambda **options: VGG((1, 1, 2, 2, 2), image_size=32, **options),
    "vit_tiny": lambda **options: VisionTransformer(12, 192, 3, image_size=32, stem="cifar", **options),
    "transformer": lambda **options: Transformer(**options),
    "transformer_masked": lambda **options: Transformer(4, causal=False, **options),
}
FIELDS = {
    "resnet50": {"norm": "group"}, "preresnet20": {"exits": True}, "mobilenetv2": {"step_size": True},
    "vgg11": {"image_size": 32}, "vit_tiny": {"image_size": 32},
}  # fmt: skip


@pytest.mark.parametrize("name", CALLED)
def test_initialise__a_network_that_is_called_is_the_named_one(name):
    net = zoo.initialise(CALLED[name](**SMALL), torch.Generator().manual_seed(1))
    named = zoo.create(name, torch.Generator().manual_seed(1), **SMALL, **FIELDS.get(name, {}))
    assert type(net) is type(named)
    assert str(net) == str(named)
    assert list(net.state_dict()) == list(named.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), named.state_dict().values()))


@pytest.mark.parametrize("name", [name for name in CALLED if name not in ("cnn", "lenet")])
def test_networks__weights_of_a_network_that_is_called_are_torch_s(name):
    """... whose layers draw them from the global generator; those of the Vision Transformer's tokens are no zeros."""
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        states.append(CALLED[name](**SMALL).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(state.values() for state in states)))
    assert all(
        tensor.isfinite().all() and tensor.unique().numel() > 1 for tensor in states[0].values() if tensor.ndim > 1
    )


@pytest.mark.parametrize(
    ("block", "depths", "channels"),
    [(BasicBlock, [1, 3], (8, 24)), (PreBottleneck, 1, [4, 8, 8, 16, 32]), (Bottleneck, (2,), (6,))],
)
def test_networks__a_resnet_has_any_number_of_sections(block, depths, channels):
    net = ResNet(block, depths, channels, num_classes=7, in_channels=2, stem="cifar")
    depths = depths if isinstance(depths, list | tuple) else [depths] * len(channels)
    sections = [net.get_submodule(f"section{i}") for i in range(1, len(channels) + 1)]
    assert [len(section) for section in sections] == list(depths)
    assert [section[0].conv1.out_channels for section in sections] == list(channels)
    x = torch.randn(2, 2, 32, 32)
    assert net(x).shape == (2, 7)
    assert net[:-2](x).shape[-1] == 32 // 2 ** (len(channels) - 1)
    half = ResNet(block, depths, channels, num_classes=7, in_channels=2, stem="cifar", width=(0.5,) * len(channels))
    assert half.head.in_features == net.head.in_features // 2


class Plain(nn.Module):
    """A block of a user's own, with a module for which `zoo.initialise` has no rule."""

    expansion = 2

    def __init__(self, inputs, channels, stride, builder):
        super().__init__()
        self.conv = builder.conv(inputs, 2 * channels, 3, stride)
        self.activation = nn.PReLU()

    def forward(self, x):
        return self.activation(self.conv(x))


def test_networks__a_resnet_takes_a_block_of_a_user_s_own():
    net = ResNet(Plain, [1, 2], [4, 8], num_classes=3)
    assert net.head.in_features == 16
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 3)


@pytest.mark.parametrize("exits", [False, True])
def test_networks__slices_and_copies_of_a_network_are_networks(exits):
    net = ResNet(BasicBlock, [1, 1], [4, 8], num_classes=3, stem="cifar", exits=exits).eval()
    x = torch.randn(2, 3, 8, 8)
    for other in (net[:], copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(other) is type(net)
        assert torch.equal(other.eval()(x), net(x))
    assert type(net) is (MultiExitResNet if exits else ResNet)
    assert torch.equal(net[1:2](net[0](x)), F.relu(net.section1(net.stem(x))))
    assert [name for name, _ in net[1:3].named_children()] == ["section1", "exit1" if exits else "section2"]
    direct = MultiExitResNet(BasicBlock, [1, 0], [4, 8], num_classes=3)
    assert [name for name, _ in direct.named_children()] == ["stem", "section1", "exit1"]


class Mine(ResNet):
    pass


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: ResNet("basic", [1], [4]), "argument: block"),
        (lambda: ResNet(BasicBlock, [1, 1], [4]), "argument: depth"),
        (lambda: ResNet(BasicBlock, [1, 0], [4, 8]), "argument"),
        (lambda: ResNet(BasicBlock, 1.5, [4, 8]), "argument"),
        (lambda: ResNet(BasicBlock, 1, 4), "argument: channels"),
        (lambda: ResNet(BasicBlock, [], []), "argument: channels"),
        (lambda: ResNet(BasicBlock, 1, [4, 0.5]), "argument: channels"),
        (lambda: ResNet(BasicBlock, 1, [4], num_classes=0), "argument: num_classes"),
        (lambda: ResNet(BasicBlock, 1, [4], in_channels=True), "argument: in_channels"),
        (lambda: ResNet(BasicBlock, 1, [4], stem="small"), "argument: stem"),
        (lambda: ResNet(BasicBlock, [1, 1], [4, 4], shortcut="none"), "argument: shortcut"),
        (lambda: ResNet(BasicBlock, 1, [4], norm="instance"), "argument: norm"),
        (lambda: ResNet(BasicBlock, 1, [4], norm_eps=0), "argument: norm_eps"),
        (lambda: ResNet(BasicBlock, 1, [4], rounding="floor"), "argument: rounding"),
        (lambda: ResNet(BasicBlock, 1, [4], scaler=1), "argument: scaler"),
        (lambda: ResNet(BasicBlock, 1, [4], step_size="yes"), "argument: step_size"),
        (lambda: ResNet(BasicBlock, 1, [4], exits=None), "argument: exits"),
        (lambda: ResNet(BasicBlock, 1, [4, 8], width=0), "argument: width"),
        (lambda: ResNet(BasicBlock, 1, [4, 8], width=(1, 1, 1)), "argument"),
        (lambda: Mine(BasicBlock, 1, [4], exits=True), "unsupported: MultiExitResNet"),
        (lambda: MobileNetV2((1, 2)), "argument"),
        (lambda: MobileNetV2(dropout=1), "argument: dropout"),
        (lambda: EfficientNetV2([], []), "argument: stages"),
        (lambda: EfficientNetV2([("fused", 1, 16, 1)], [1]), "argument: Stage"),
        (lambda: EfficientNetV2([Stage("fuse", 1, 16, 1)], [1]), "argument: fused"),
        (lambda: EfficientNetV2([Stage("fused", 1, 0, 1)], [1]), "argument: channels"),
        (lambda: EfficientNetV2(STAGES, 1, drop_path=-0.1), "argument: drop_path"),
        (lambda: EfficientNetV2(STAGES, 1, last_channels=0), "argument: last_channels"),
        (lambda: VGG((1, 1, 1)), "argument"),
        (lambda: VGG(1, image_size=31), "argument"),
        (lambda: VisionTransformer((1, 1), 8, 2), "argument"),
        (lambda: VisionTransformer(1, 8, 3), "argument"),
        (lambda: VisionTransformer(1, 8, 2, image_size=30), "argument"),
        (lambda: VisionTransformer(1, 0, 1), "argument: channels"),
        (lambda: Transformer(tokens=0), "argument: tokens"),
        (lambda: Transformer(1, width=(1, 1)), "argument: width"),
        (lambda: CNN(image_size=3), "argument"),
        (lambda: CNN(width=(1, 1)), "argument"),
        (lambda: LeNet(image_size=8), "argument"),
    ],
)
def test_networks__wrong_arguments_are_refused(make, expected):
    with zoo_refused(expected):
        make()


@pytest.mark.parametrize("name", some(PRESETS, [*PRESETS][::3]))
def test_networks__a_row_of_the_table_is_what_its_spec_builds(name):
    """It holds arguments of the class and fields of a spec alone, and what its class does not take is the images'."""
    row = PRESETS[name]
    taken = inspect.signature(row.network).parameters
    assert row.arguments.keys() - taken.keys() <= {"image_size"}
    assert Spec(name).depth == row.depth
    spec = Spec(name)
    with torch.device("meta"):
        net = row.build(**({"stem": spec.stem} if spec.stem else {}))
    assert str(net) == str(spec.build(device="meta"))


def test_networks__a_network_needs_no_spec_to_be_narrow():
    """The classes' widths are those of specs, part by part."""
    net = MobileNetV2(width=(0.5,) * 7 + (1,), num_classes=3)
    assert (net.head.in_features, net.section7[0].branch.project.conv.out_channels) == (1280, 160)
    net = VGG(1, width=(0.1,) * 5 + (0.01,), image_size=32)
    assert (net.section5[0].conv.out_channels, net.head.in_features) == (52, 41)
