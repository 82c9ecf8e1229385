"""ResNets, post-activation and pre-activation.

He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016), and "Identity Mappings in Deep Residual Networks"
(ECCV 2016).

A stem, sections of residual blocks, global average pooling and the classifier. Each section but the first halves the
image. Pre-activation networks have a stem without norm and activation, also with stem="imagenet" (the second paper's
ImageNet networks normalise and activate before the pooling).
"""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import ZooError
from zoo.layers import GlobalPool, Kit, Network
from zoo.spec import COMMON, Member, Spec

Shortcut: TypeAlias = Literal["projection", "pad", "activated", "raw"]
"""What a block adds to its branch if it changes the shape.

`projection`: a strided 1x1 convolution with its norm. `pad`: every second pixel, and zero channels appended (option A
of the first paper, for small images: no parameters). Pre-activation blocks have a strided 1x1 convolution without a
norm, of the activated input (`activated`, as in the paper's code and in HeteroFL) or of the input as it is (`raw`, as
in FedMR's released code).
"""


class ResNet(Network):
    """stem, section1, section2, ..., pool, head; build it with `zoo.create`."""


class MultiExitResNet(ResNet):
    """stem, section1, exit1, section2, exit2, ...: each exit classifies what the section before it gives.

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


class PadShortcut(nn.Module):
    """Every `stride`-th pixel, with zero channels appended (or the last channels left out)."""

    def __init__(self, stride: int, new_channels: int) -> None:
        super().__init__()
        self.stride, self.new_channels = stride, new_channels

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new_channels))


class Bypassed(nn.Sequential):
    """Modules that the model has but does not use.

    FedMR's released ResNet-20 has a last norm, which counts among its 219,482 parameters and its layers, but its
    forward pass leaves it out.
    """

    def forward(self, x: Tensor) -> Tensor:
        return x


def make_shortcut(kit: Kit, inputs: int, outputs: int, stride: int, kind: Shortcut) -> nn.Module:
    """The shortcut around a block; the identity if the block keeps the shape. ZooError for an unknown kind."""
    if kind not in get_args(Shortcut):
        raise ZooError(f"unknown shortcut {kind!r}: choose {', '.join(get_args(Shortcut))}")
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    if kind == "pad":
        return PadShortcut(stride, outputs - inputs)
    if kind == "projection":
        return kit.conv_norm(inputs, outputs, 1, stride)
    return nn.Conv2d(inputs, outputs, 1, stride, bias=False)


class BasicBlock(nn.Module):
    """conv-norm-ReLU-conv-norm plus shortcut, then ReLU (2016a, figure 5, left)."""

    expansion = 1

    def __init__(self, inputs: int, channels: int, stride: int, kit: Kit, shortcut: Shortcut = "projection") -> None:
        super().__init__()
        self.conv1 = kit.conv(inputs, channels, 3, stride)
        self.norm1 = kit.make_norm(channels)
        self.conv2 = kit.conv(channels, channels, 3)
        self.norm2 = kit.make_norm(channels)
        self.shortcut = make_shortcut(kit, inputs, channels, stride, shortcut)
        self.scaler, self.add = kit.scaler(), kit.residual()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.scaler(self.conv1(x))))
        out = self.norm2(self.scaler(self.conv2(out)))
        return F.relu(self.add(self.shortcut(x), out))


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up to four times the channels, plus shortcut, then ReLU (2016a, figure 5, right).

    The stride is in the 3x3 convolution, as in torchvision and timm ("v1.5"), not in the first as in the paper.
    """

    expansion = 4

    def __init__(self, inputs: int, channels: int, stride: int, kit: Kit, shortcut: Shortcut = "projection") -> None:
        super().__init__()
        outputs = channels * self.expansion
        self.conv1 = kit.conv(inputs, channels, 1)
        self.norm1 = kit.make_norm(channels)
        self.conv2 = kit.conv(channels, channels, 3, stride)
        self.norm2 = kit.make_norm(channels)
        self.conv3 = kit.conv(channels, outputs, 1)
        self.norm3 = kit.make_norm(outputs)
        self.shortcut = make_shortcut(kit, inputs, outputs, stride, shortcut)
        self.scaler, self.add = kit.scaler(), kit.residual()

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.scaler(self.conv1(x))))
        out = F.relu(self.norm2(self.scaler(self.conv2(out))))
        out = self.norm3(self.scaler(self.conv3(out)))
        return F.relu(self.add(self.shortcut(x), out))


class PreActivation(nn.Module):
    """Norm and ReLU come before each convolution, and nothing comes after the sum (2016b, figure 1b)."""

    expansion: int
    norm1: nn.Module
    branch: Callable[[Tensor], Tensor]

    def _finish(self, inputs: int, outputs: int, stride: int, kit: Kit, shortcut: Shortcut) -> None:
        self.shortcut = make_shortcut(kit, inputs, outputs, stride, shortcut)
        self.scaler, self.add = kit.scaler(), kit.residual()
        self.activated = shortcut == "activated" and not isinstance(self.shortcut, nn.Identity)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(self.scaler(x)))
        return self.add(self.shortcut(active if self.activated else x), self.branch(active))


class PreBasicBlock(PreActivation):
    """norm-ReLU-conv-norm-ReLU-conv plus shortcut."""

    expansion = 1

    def __init__(self, inputs: int, channels: int, stride: int, kit: Kit, shortcut: Shortcut = "activated") -> None:
        super().__init__()
        self.norm1 = kit.make_norm(inputs)
        self.conv1 = kit.conv(inputs, channels, 3, stride)
        self.norm2 = kit.make_norm(channels)
        self.conv2 = kit.conv(channels, channels, 3)
        self._finish(inputs, channels, stride, kit, shortcut)

    def branch(self, active: Tensor) -> Tensor:
        return self.conv2(F.relu(self.norm2(self.scaler(self.conv1(active)))))


class PreBottleneck(PreActivation):
    """The bottleneck in pre-activation order (2016b, section 4)."""

    expansion = 4

    def __init__(self, inputs: int, channels: int, stride: int, kit: Kit, shortcut: Shortcut = "activated") -> None:
        super().__init__()
        self.norm1 = kit.make_norm(inputs)
        self.conv1 = kit.conv(inputs, channels, 1)
        self.norm2 = kit.make_norm(channels)
        self.conv2 = kit.conv(channels, channels, 3, stride)
        self.norm3 = kit.make_norm(channels)
        self.conv3 = kit.conv(channels, channels * self.expansion, 1)
        self._finish(inputs, channels * self.expansion, stride, kit, shortcut)

    def branch(self, active: Tensor) -> Tensor:
        out = self.conv2(F.relu(self.norm2(self.scaler(self.conv1(active)))))
        return self.conv3(F.relu(self.norm3(self.scaler(out))))


def resnet(
    spec: Spec,
    block: type[BasicBlock | Bottleneck | PreActivation],
    channels: tuple[int, ...],
    shortcut: Shortcut,
    final_norm: bool = True,
) -> ResNet:
    """Build a ResNet.

    Args:
        channels: of each section's 3x3 convolutions at full width; the stem has those of the first section.
        shortcut: see `Shortcut`.
        final_norm: of pre-activation networks: whether norm and ReLU come before the pooling, or are bypassed.
    """
    pre, kit = issubclass(block, PreActivation), spec.kit("section1")
    current = kit.channels(channels[0])
    kernel, stride = (7, 2) if spec.stem == "imagenet" else (3, 1)
    if pre:
        stem = nn.Sequential(OrderedDict(conv=kit.conv(spec.in_channels, current, kernel, stride)))
    else:
        stem = kit.conv_norm(spec.in_channels, current, kernel, stride, activation=nn.ReLU)
    if spec.stem == "imagenet":
        stem.add_module("pool", nn.MaxPool2d(3, 2, padding=1))
    parts: OrderedDict[str, nn.Module] = OrderedDict(stem=stem)

    def ending(kit: Kit, inputs: int) -> OrderedDict[str, nn.Module]:
        parts: OrderedDict[str, nn.Module] = OrderedDict()
        if pre:
            tail = {"scaler": kit.scaler(), "norm": kit.make_norm(inputs), "activation": nn.ReLU()}
            parts["tail"] = (nn.Sequential if final_norm else Bypassed)(OrderedDict(tail))
        return parts | {"pool": GlobalPool(), "head": nn.Linear(inputs, spec.num_classes)}

    for i, (full, depth) in enumerate(zip(channels, spec.blocks), start=1):
        if not depth:
            break  # a model with exits ends with the exit of its last section
        kit, blocks = spec.kit(f"section{i}"), []
        for j in range(depth):
            blocks.append(block(current, kit.channels(full), 2 if i > 1 and j == 0 else 1, kit, shortcut))
            current = kit.channels(full) * block.expansion
        parts[f"section{i}"] = nn.Sequential(*blocks)
        if spec.exits:
            parts[f"exit{i}"] = nn.Sequential(ending(kit, current))
    return MultiExitResNet(parts) if spec.exits else ResNet(parts | ending(kit, current))


_2016A, _2016B = "He et al., CVPR 2016", "He et al., ECCV 2016"
_LARGE, _SMALL = (64, 128, 256, 512), (16, 32, 64)
_CIFAR = COMMON | {
    "num_classes": 10, "in_channels": 3, "image_size": 32, "stem": "cifar", "norm": "batch", "step_size": False,
    "exits": False,
}  # fmt: skip
_IMAGENET = _CIFAR | {"num_classes": 1000, "image_size": 224, "stem": "imagenet"}

MEMBERS = {
    **{
        name: Member(
            partial(resnet, block=block, channels=_LARGE, shortcut="projection"), depth, f"{_2016A}, table 1",
            _IMAGENET, torchvision=name, timm=name,
        )
        for name, block, depth in (
            ("resnet18", BasicBlock, (2, 2, 2, 2)),
            ("resnet34", BasicBlock, (3, 4, 6, 3)),
            ("resnet50", Bottleneck, (3, 4, 6, 3)),
        )
    },
    **{
        f"resnet{6 * n + 2}": Member(
            partial(resnet, block=BasicBlock, channels=_SMALL, shortcut="pad"), (n, n, n), f"{_2016A}, section 4.2",
            _CIFAR,
        )
        for n in (3, 5, 7, 9, 18)
    },
    "resnet9": Member(
        partial(resnet, block=BasicBlock, channels=(8, 16, 32, 64), shortcut="projection"), (1, 1, 1, 1),
        "FeMAM, released code", _CIFAR | {"num_classes": 100},
    ),
    "preresnet18": Member(
        partial(resnet, block=PreBasicBlock, channels=_LARGE, shortcut="activated"), (2, 2, 2, 2),
        f"{_2016B}; HeteroFL and FedFA", _CIFAR,
    ),
    "preresnet20": Member(
        partial(resnet, block=PreBasicBlock, channels=_SMALL, shortcut="activated"), (3, 3, 3), f"{_2016B}, section 4",
        _CIFAR,
    ),
    "resnet20_fedmr": Member(
        partial(resnet, block=PreBottleneck, channels=_SMALL, shortcut="raw", final_norm=False), (2, 2, 2),
        "FedMR, released code", _CIFAR,
    ),
}  # fmt: skip
