"""EfficientNetV2: Tan and Le, "EfficientNetV2: Smaller Models and Faster Training" (ICML 2021), table 4.

Early sections have fused blocks (a full 3x3 convolution), later ones depthwise blocks with squeeze-and-excitation.
Batch norm has epsilon 0.001, as in the released code and torchvision; timm's efficientnetv2_s has 1e-5 (`norm_eps`).
The last convolution (1280 channels) has a width rate of its own, which comes after those of the sections.
"""

from collections import OrderedDict
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from zoo.blueprint import Blueprint
from zoo.kit import GlobalPool, Kit
from zoo.member import Member, section_names
from zoo.network import Network


class EfficientNetV2(Network):
    """stem, section1, ..., tail, pool, dropout, head; build it with `zoo.create`."""


class Stage(NamedTuple):
    """A row of table 4: whether blocks are fused or depthwise, expansion, channels, and the first block's stride."""

    fused: bool
    expansion: int
    channels: int
    stride: int


class SqueezeExcitation(nn.Module):
    """Weights each channel by a gate that is computed from the means of all channels (Hu et al., CVPR 2018)."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.reduce = nn.Conv2d(channels, squeezed, 1)
        self.activation = nn.SiLU()
        self.expand = nn.Conv2d(squeezed, channels, 1)
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.expand(self.activation(self.reduce(self.pool(x)))))


class MBConv(nn.Module):
    """A (fused) inverted residual (figure 2); the squeezed width is a quarter of the block's input, rounded down."""

    def __init__(
        self, inputs: int, channels: int, stage: Stage, stride: int, residual: bool, drop_path: float, kit: Kit
    ) -> None:
        super().__init__()
        hidden = inputs * stage.expansion
        steps: OrderedDict[str, nn.Module] = OrderedDict()
        if stage.fused and stage.expansion == 1:
            steps["fused"] = kit.conv_norm(inputs, channels, 3, stride, activation=nn.SiLU)
        elif stage.fused:
            steps["fused"] = kit.conv_norm(inputs, hidden, 3, stride, activation=nn.SiLU)
            steps["project"] = kit.conv_norm(hidden, channels, 1)
        else:
            steps["expand"] = kit.conv_norm(inputs, hidden, 1, activation=nn.SiLU)
            steps["depthwise"] = kit.conv_norm(hidden, hidden, 3, stride, groups=hidden, activation=nn.SiLU)
            steps["squeeze"] = SqueezeExcitation(hidden, max(1, inputs // 4))
            steps["project"] = kit.conv_norm(hidden, channels, 1)
        self.branch = nn.Sequential(steps)
        self.add = kit.residual(drop_path) if residual else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.branch(x)
        return out if self.add is None else self.add(x, out)


def efficientnetv2(spec: Blueprint, stages: tuple[Stage, ...], stem: int, last: int) -> EfficientNetV2:
    """Build an EfficientNetV2; stochastic depth grows linearly over the blocks up to `spec.drop_path`."""
    first = spec.kit("section1")
    full, current = stem, spec.channels(stem, "section1")
    stride = 1 if spec.stem == "cifar" else 2
    parts: dict[str, nn.Module] = {"stem": first.conv_norm(spec.in_channels, current, 3, stride, activation=nn.SiLU)}
    index, blocks_in_all = 0, sum(spec.depth)
    for name, stage, depth in zip(section_names(len(stages)), stages, spec.depth):
        width, kit = spec.channels(stage.channels, name), spec.kit(name)
        blocks = []
        for j in range(depth):
            stride = stage.stride if j == 0 else 1
            residual = (
                stride == 1 and full == stage.channels
            )  # by the full widths, so that rounding makes no difference
            drop_path = spec.drop_path * index / blocks_in_all
            blocks.append(MBConv(current, width, stage, stride, residual, drop_path, kit))
            full, current, index = stage.channels, width, index + 1
        parts[name] = nn.Sequential(*blocks)
    channels = spec.channels(last, "tail")
    parts["tail"] = spec.kit("tail").conv_norm(current, channels, 1, activation=nn.SiLU)
    parts |= {"pool": GlobalPool(), "dropout": nn.Dropout(spec.dropout), "head": nn.Linear(channels, spec.num_classes)}
    return EfficientNetV2(OrderedDict(parts))


def _member(stages, depth, stem, last, source, dropout, small=False) -> Member:
    defaults = {
        "num_classes": 10 if small else 1000,
        "in_channels": 3,
        "image_size": 32 if small else 224,
        "stem": "cifar" if small else "imagenet",
        "norm": "batch",
        "norm_eps": 1e-3,
        "rounding": "divisor8",
        "dropout": dropout,
        "drop_path": 0.2,
        "step_size": False,
    }
    build = partial(efficientnetv2, stages=stages, stem=stem, last=last)
    return Member(build, depth, (*section_names(len(stages)), "tail"), defaults, source)


_S = (
    Stage(True, 1, 24, 1), Stage(True, 4, 48, 2), Stage(True, 4, 64, 2),
    Stage(False, 4, 128, 2), Stage(False, 6, 160, 1), Stage(False, 6, 256, 2),
)  # fmt: skip
_M = (
    Stage(True, 1, 24, 1), Stage(True, 4, 48, 2), Stage(True, 4, 80, 2),
    Stage(False, 4, 160, 2), Stage(False, 6, 176, 1), Stage(False, 6, 304, 2), Stage(False, 6, 512, 1),
)  # fmt: skip
_CIFAR = (
    Stage(True, 1, 16, 1), Stage(True, 4, 32, 2), Stage(True, 4, 48, 2),
    Stage(False, 4, 96, 2), Stage(False, 6, 112, 1),
)  # fmt: skip

MEMBERS = {
    "efficientnetv2_s": _member(_S, (2, 4, 4, 6, 9, 15), 24, 1280, "Tan and Le, ICML 2021, table 4", 0.2),
    "efficientnetv2_m": _member(_M, (3, 5, 5, 7, 14, 18, 5), 24, 1280, "Tan and Le, ICML 2021, released code", 0.3),
    "efficientnetv2_cifar": _member(_CIFAR, (1, 2, 2, 3, 5), 16, 640, "of this project, for 32x32", 0.2, small=True),
}
