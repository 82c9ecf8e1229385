"""ResNets, post-activation and pre-activation.

He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016), and "Identity Mappings in Deep Residual Networks"
(ECCV 2016).

A stem, sections of residual blocks, global average pooling and the classifier. Each section but the first halves the
image. Pre-activation networks have a stem without norm and activation, also with stem="imagenet" (the second paper's
ImageNet networks normalise and activate before the pooling).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.architecture import Architecture, Rounding, Stem, check_depths
from zoo.errors import ZooError
from zoo.layers import Builder, GlobalPool, Network
from zoo.norms import Norm

Shortcut: TypeAlias = Literal["projection", "pad", "activated", "raw"]
"""What a block adds to its branch if it changes the shape.

`projection`: a strided 1x1 convolution with its norm. `pad`: every second pixel, and zero channels appended (option A
of the first paper, for small images: no parameters). Pre-activation blocks have a strided 1x1 convolution without a
norm, of the activated input (`activated`, as in the paper's code and in HeteroFL) or of the input as it is (`raw`, as
in FedMR's released code).
"""


class PadShortcut(nn.Module):
    """Every `stride`-th pixel, with zero channels appended or last channels left out."""

    def __init__(self, stride: int, new_channels: int) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, new_channels

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class Unused(nn.Sequential):
    """Modules that the model has but does not use.

    FedMR's released ResNet-20 has a last norm, which counts among its 219,482 parameters and its layers, but its
    forward pass leaves it out.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x


def make_shortcut(builder: Builder, inputs: int, outputs: int, stride: int, kind: Shortcut) -> nn.Module:
    """Return the shortcut around a block, the identity if shapes agree.

    Raises ZooError for an unknown kind.
    """
    if kind not in get_args(Shortcut):
        raise ZooError(f"unknown shortcut {kind!r}: choose {', '.join(get_args(Shortcut))}", code="argument")
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    if kind == "pad":
        return PadShortcut(stride, outputs - inputs)
    if kind == "projection":
        return builder.conv_norm(inputs, outputs, 1, stride)
    return nn.Conv2d(inputs, outputs, 1, stride, bias=False)


class BasicBlock(nn.Module):
    """conv-norm-ReLU-conv-norm plus shortcut, then ReLU (2016a, figure 5, left)."""

    expansion = 1

    def __init__(
        self, inputs: int, channels: int, stride: int, builder: Builder, shortcut: Shortcut = "projection"
    ) -> None:
        super().__init__()
        self.conv1 = builder.conv(inputs, channels, 3, stride)
        self.norm1 = builder.make_norm(channels)
        self.conv2 = builder.conv(channels, channels, 3)
        self.norm2 = builder.make_norm(channels)
        self.shortcut = make_shortcut(builder, inputs, channels, stride, shortcut)
        self.scaler, self.add = builder.make_scaler(), builder.residual()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.scaler(self.conv1(x))))
        out = self.norm2(self.scaler(self.conv2(out)))
        return F.relu(self.add(self.shortcut(x), out))


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times the channels; sum, then ReLU.

    See 2016a, figure 5, right.

    The stride is in the 3x3 convolution, as in torchvision and timm ("v1.5"), not in the first as in the paper.
    """

    expansion = 4

    def __init__(
        self, inputs: int, channels: int, stride: int, builder: Builder, shortcut: Shortcut = "projection"
    ) -> None:
        super().__init__()
        outputs = channels * self.expansion
        self.conv1 = builder.conv(inputs, channels, 1)
        self.norm1 = builder.make_norm(channels)
        self.conv2 = builder.conv(channels, channels, 3, stride)
        self.norm2 = builder.make_norm(channels)
        self.conv3 = builder.conv(channels, outputs, 1)
        self.norm3 = builder.make_norm(outputs)
        self.shortcut = make_shortcut(builder, inputs, outputs, stride, shortcut)
        self.scaler, self.add = builder.make_scaler(), builder.residual()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.scaler(self.conv1(x))))
        out = F.relu(self.norm2(self.scaler(self.conv2(out))))
        out = self.norm3(self.scaler(self.conv3(out)))
        return F.relu(self.add(self.shortcut(x), out))


class PreActivation(nn.Module):
    """Norm and ReLU before each convolution, nothing after the sum (2016b, figure 1b)."""

    expansion: int
    norm1: nn.Module
    branch: Callable[[Tensor], Tensor]

    def _finish(self, inputs: int, outputs: int, stride: int, builder: Builder, shortcut: Shortcut) -> None:
        self.shortcut = make_shortcut(builder, inputs, outputs, stride, shortcut)
        self.scaler, self.add = builder.make_scaler(), builder.residual()
        self.activated = shortcut == "activated" and not isinstance(self.shortcut, nn.Identity)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(self.scaler(x)))
        return self.add(self.shortcut(active if self.activated else x), self.branch(active))


class PreBasicBlock(PreActivation):
    """norm-ReLU-conv-norm-ReLU-conv plus shortcut."""

    expansion = 1

    def __init__(
        self, inputs: int, channels: int, stride: int, builder: Builder, shortcut: Shortcut = "activated"
    ) -> None:
        super().__init__()
        self.norm1 = builder.make_norm(inputs)
        self.conv1 = builder.conv(inputs, channels, 3, stride)
        self.norm2 = builder.make_norm(channels)
        self.conv2 = builder.conv(channels, channels, 3)
        self._finish(inputs, channels, stride, builder, shortcut)

    def branch(self, active: Tensor) -> Tensor:
        return self.conv2(F.relu(self.norm2(self.scaler(self.conv1(active)))))


class PreBottleneck(PreActivation):
    """The bottleneck in pre-activation order (2016b, section 4)."""

    expansion = 4

    def __init__(
        self, inputs: int, channels: int, stride: int, builder: Builder, shortcut: Shortcut = "activated"
    ) -> None:
        super().__init__()
        self.norm1 = builder.make_norm(inputs)
        self.conv1 = builder.conv(inputs, channels, 1)
        self.norm2 = builder.make_norm(channels)
        self.conv2 = builder.conv(channels, channels, 3, stride)
        self.norm3 = builder.make_norm(channels)
        self.conv3 = builder.conv(channels, channels * self.expansion, 1)
        self._finish(inputs, channels * self.expansion, stride, builder, shortcut)

    def branch(self, active: Tensor) -> Tensor:
        out = self.conv2(F.relu(self.norm2(self.scaler(self.conv1(active)))))
        return self.conv3(F.relu(self.norm3(self.scaler(out))))


Block: TypeAlias = type[BasicBlock | Bottleneck | PreActivation]


def make_stem(builder: Builder, inputs: int, outputs: int, stem: Stem, pre: bool) -> nn.Sequential:
    """Return the convolution before the first section, if `pre` without norm and ReLU."""
    sizes = (inputs, outputs, 7, 2) if stem == "imagenet" else (inputs, outputs, 3)
    if pre:
        result = nn.Sequential(OrderedDict(conv=builder.conv(*sizes)))
    else:
        result = builder.conv_norm(*sizes, activation=nn.ReLU)
    if stem == "imagenet":
        result.add_module("pool", nn.MaxPool2d(3, 2, padding=1))
    return result


class ResNet(Network):
    """stem, section1, section2, ..., pool, head.

    Args:
        block: BasicBlock, Bottleneck, PreBasicBlock, PreBottleneck, or a class that is called as they are.
        depths: blocks of each section; one number is for all. With exits the last sections may have 0.
        channels: of each section's 3x3 convolutions at full width; the stem has the first section's.
        shortcut: see `Shortcut`; None is the block's own.
        final_norm: of pre-activation networks: whether norm and ReLU come before the pooling, or are unused.
        width: one rate, or one for each section.
        exits: gives a `MultiExitResNet`.

    >>> net = ResNet(BasicBlock, [1, 2, 1], [16, 32, 64], num_classes=10, stem="cifar", width=0.5)
    >>> net(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    exits = False

    def __init__(
        self, block: Block, depths: int | Sequence[int], channels: Sequence[int], *,
        num_classes: int = 1000, in_channels: int = 3, stem: Stem = "imagenet", shortcut: Shortcut | None = None,
        final_norm: bool = True, exits: bool = False, width: float | Sequence[float] = 1.0, norm: Norm = "batch",
        norm_eps: float = 1e-5, rounding: Rounding = "ceil", scaler: bool = False, step_size: bool = False,
    ) -> None:  # fmt: skip
        self.check(num_classes=num_classes, in_channels=in_channels, stem=stem, exits=exits)
        if not (isinstance(block, type) and hasattr(block, "expansion")):
            raise ZooError(f"block is a class such as BasicBlock, with an expansion, got {block!r}", code="argument")
        if not isinstance(channels, tuple | list) or not channels:
            raise ZooError(f"channels are those of sections, as [64, 128, 256, 512], got {channels!r}", code="argument")
        for count in channels:
            self.check(channels=count)
        if exits and type(self) not in (ResNet, MultiExitResNet):
            raise ZooError(f"{type(self).__name__} has no exits: derive it from MultiExitResNet", code="unsupported")
        exits = exits or self.exits
        depths = check_depths(type(self).__name__, depths, len(channels), exits)
        builders = self.builders(
            width, len(depths), norm=norm, norm_eps=norm_eps, rounding=rounding, scaler=scaler, step_size=step_size
        )
        pre = issubclass(block, PreActivation)
        options: dict[str, Any] = {} if shortcut is None else {"shortcut": shortcut}

        def ending(builder: Builder, inputs: int) -> dict[str, nn.Module]:
            parts: dict[str, nn.Module] = {}
            if pre:
                tail = {"scaler": builder.make_scaler(), "norm": builder.make_norm(inputs), "activation": nn.ReLU()}
                parts["tail"] = (nn.Sequential if final_norm else Unused)(OrderedDict(tail))
            return parts | {"pool": GlobalPool(), "head": nn.Linear(inputs, num_classes)}

        current = builders[0].channels(channels[0])
        parts: dict[str, nn.Module] = {"stem": make_stem(builders[0], in_channels, current, stem, pre)}
        for i, (builder, full, depth) in enumerate(zip(builders, channels, depths), start=1):
            if not depth:
                break  # a network with exits ends with the exit of its last section
            section = []
            for j in range(depth):
                stride = 2 if i > 1 and j == 0 else 1
                section.append(block(current, builder.channels(full), stride, builder, **options))
                current = builder.channels(full) * block.expansion
            parts[f"section{i}"], last = nn.Sequential(*section), ending(builder, current)
            if exits:
                parts[f"exit{i}"] = nn.Sequential(OrderedDict(last))
        super().__init__(parts if exits else parts | last)
        if exits and not self.exits:
            self.__class__ = MultiExitResNet  # whose `forward` is its own: without exits a ResNet is a plain Sequential


class MultiExitResNet(ResNet):
    """stem, section1, exit1, section2, ...: each exit classifies its section's output.

    In training the output is all exits' logits, [N, exits, classes]; in evaluation mode it is their mean, [N, classes],
    which is how the models of DepthFL (Kim et al., ICLR 2023) predict. That paper's exits are deeper: attention and
    separable convolutions come before their pooling. A slice without an exit, such as `net[:2]`, gives what its last
    part does.
    """

    exits = True

    def forward(self, x: Tensor) -> Tensor:
        exits = []
        for name, part in self.named_children():
            if name.startswith("exit"):
                exits.append(part(x))
            else:
                x = part(x)
        if not exits:
            return x
        logits = torch.stack(exits, 1)
        return logits if self.training else logits.mean(1)


_2016A, _2016B = "He et al., CVPR 2016", "He et al., ECCV 2016"
_LARGE, _SMALL = (64, 128, 256, 512), (16, 32, 64)
_CIFAR = {"num_classes": 10, "image_size": 32, "stem": "cifar"}


def _preset(block: Block, depths: tuple, channels: tuple, others: dict, source: str, **names: str) -> Architecture:
    return Architecture(ResNet, {"block": block, "depths": depths, "channels": channels, **others}, source, **names)


PRESETS = {
    **{
        name: _preset(block, depths, _LARGE, {"image_size": 224}, f"{_2016A}, table 1", torchvision=name, timm=name)
        for name, block, depths in (
            ("resnet18", BasicBlock, (2, 2, 2, 2)),
            ("resnet34", BasicBlock, (3, 4, 6, 3)),
            ("resnet50", Bottleneck, (3, 4, 6, 3)),
        )
    },
    **{
        f"resnet{6 * n + 2}": _preset(
            BasicBlock, (n, n, n), _SMALL, _CIFAR | {"shortcut": "pad"}, f"{_2016A}, section 4.2"
        )
        for n in (3, 5, 7, 9, 18)
    },
    "resnet9": _preset(
        BasicBlock, (1, 1, 1, 1), (8, 16, 32, 64), _CIFAR | {"num_classes": 100}, "FeMAM, released code"
    ),
    "preresnet18": _preset(PreBasicBlock, (2, 2, 2, 2), _LARGE, _CIFAR, f"{_2016B}; HeteroFL and FedFA"),
    "preresnet20": _preset(PreBasicBlock, (3, 3, 3), _SMALL, _CIFAR, f"{_2016B}, section 4"),
    "resnet20_fedmr": _preset(
        PreBottleneck, (2, 2, 2), _SMALL, _CIFAR | {"shortcut": "raw", "final_norm": False}, "FedMR, released code"
    ),
}
