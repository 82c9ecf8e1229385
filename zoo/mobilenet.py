"""Networks of inverted residuals.

MobileNetV2: Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks" (CVPR 2018), table 2. For small
images (`stem="cifar"`) the stem and the second section keep the image's size. At width rates below 1 the paper leaves
the last convolution at 1280 channels. Here a single rate narrows it, too, so that all of a narrow model is small. It
also has a rate of its own, the last one: `width=(0.5,) * 7 + (1,)` is the paper's 0.5.

EfficientNetV2: Tan and Le, "EfficientNetV2: Smaller Models and Faster Training" (ICML 2021), table 4. Early sections
have fused blocks (a full 3x3 convolution), later ones depthwise blocks with squeeze-and-excitation. Batch norm has
epsilon 0.001, as in the released code and torchvision; timm's efficientnetv2_s has 1e-5 (`norm_eps`). Its last
convolution has a width rate of its own, too.
"""

from collections import OrderedDict
from functools import partial
from typing import NamedTuple

from torch import Tensor, nn

from zoo.layers import GlobalPool, Kit, Network
from zoo.spec import COMMON, Member, Spec


class MobileNetV2(Network):
    """stem, section1, ..., section7, tail, pool, dropout, head; build it with `zoo.create`."""


class EfficientNetV2(Network):
    """stem, section1, ..., tail, pool, dropout, head; build it with `zoo.create`."""


class Stage(NamedTuple):
    """A row of the papers' tables: kind of blocks, expansion, channels, and the first block's stride."""

    kind: str
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


class InvertedResidual(nn.Module):
    """1x1 up, 3x3 depthwise, 1x1 down without activation; plus the shortcut if the shape stays the same.

    MobileNetV2's blocks are `plain` (figure 4d). EfficientNetV2's squeeze the hidden channels to a quarter of the
    block's inputs, rounded down (`squeezed`), or have one full 3x3 convolution instead of the first two (`fused`;
    figure 2).
    """

    def __init__(
        self, inputs: int, channels: int, stage: Stage, stride: int, residual: bool, drop_path: float, kit: Kit
    ) -> None:
        super().__init__()
        hidden = inputs * stage.expansion
        conv_norm = partial(kit.conv_norm, activation=nn.ReLU6 if stage.kind == "plain" else nn.SiLU)
        steps: OrderedDict[str, nn.Module] = OrderedDict()
        if stage.kind == "fused":
            steps["fused"] = conv_norm(inputs, hidden if stage.expansion > 1 else channels, 3, stride)
        else:
            if stage.expansion > 1:
                steps["expand"] = conv_norm(inputs, hidden, 1)
            steps["depthwise"] = conv_norm(hidden, hidden, 3, stride, groups=hidden)
        if stage.kind == "squeezed":
            steps["squeeze"] = SqueezeExcitation(hidden, max(1, inputs // 4))
        if stage.kind != "fused" or stage.expansion > 1:
            steps["project"] = kit.conv_norm(hidden, channels, 1)
        self.branch = nn.Sequential(steps)
        self.add = kit.residual(drop_path) if residual else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.branch(x)
        return out if self.add is None else self.add(x, out)


def mobilenetv2(spec: Spec) -> MobileNetV2:
    """Build a MobileNetV2."""
    stages = list(_MOBILENETV2)
    if spec.stem == "cifar":
        stages[1] = stages[1]._replace(stride=1)
    return MobileNetV2(_parts(spec, stages, 32, 1280, nn.ReLU6))


def efficientnetv2(spec: Spec, stages: tuple[Stage, ...], stem: int, last: int) -> EfficientNetV2:
    """Build an EfficientNetV2; stochastic depth grows linearly over the blocks up to `spec.drop_path`."""
    return EfficientNetV2(_parts(spec, stages, stem, last, nn.SiLU))


def _parts(spec: Spec, stages, full: int, last: int, activation: type[nn.Module]) -> OrderedDict[str, nn.Module]:
    kit = spec.kit("section1")
    current, stride = kit.channels(full), 1 if spec.stem == "cifar" else 2
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["stem"] = kit.conv_norm(spec.in_channels, current, 3, stride, activation=activation)
    index, drop_path = 0, spec.drop_path or 0.0
    for i, (stage, depth) in enumerate(zip(stages, spec.blocks), start=1):
        kit, blocks = spec.kit(f"section{i}"), []
        for stride in (stage.stride, *[1] * (depth - 1)):
            # by the full widths, so that rounding makes no difference
            residual = stride == 1 and full == stage.channels
            width = kit.channels(stage.channels)
            drop = drop_path * index / sum(spec.blocks)
            blocks.append(InvertedResidual(current, width, stage, stride, residual, drop, kit))
            full, current, index = stage.channels, width, index + 1
        parts[f"section{i}"] = nn.Sequential(*blocks)
    kit = spec.kit("tail")
    parts["tail"] = kit.conv_norm(current, kit.channels(last), 1, activation=activation)
    parts |= {"pool": GlobalPool(), "dropout": nn.Dropout(spec.dropout)}
    parts["head"] = nn.Linear(kit.channels(last), spec.num_classes)
    return parts


_MOBILENETV2 = (
    Stage("plain", 1, 16, 1), Stage("plain", 6, 24, 2), Stage("plain", 6, 32, 2), Stage("plain", 6, 64, 2),
    Stage("plain", 6, 96, 1), Stage("plain", 6, 160, 2), Stage("plain", 6, 320, 1),
)  # fmt: skip
_S = (
    Stage("fused", 1, 24, 1), Stage("fused", 4, 48, 2), Stage("fused", 4, 64, 2),
    Stage("squeezed", 4, 128, 2), Stage("squeezed", 6, 160, 1), Stage("squeezed", 6, 256, 2),
)  # fmt: skip
_M = (
    Stage("fused", 1, 24, 1), Stage("fused", 4, 48, 2), Stage("fused", 4, 80, 2),
    Stage("squeezed", 4, 160, 2), Stage("squeezed", 6, 176, 1), Stage("squeezed", 6, 304, 2),
    Stage("squeezed", 6, 512, 1),
)  # fmt: skip
_CIFAR = (
    Stage("fused", 1, 16, 1), Stage("fused", 4, 32, 2), Stage("fused", 4, 48, 2),
    Stage("squeezed", 4, 96, 2), Stage("squeezed", 6, 112, 1),
)  # fmt: skip


_IMAGES = COMMON | {
    "num_classes": 1000, "in_channels": 3, "image_size": 224, "stem": "imagenet", "norm": "batch",
    "rounding": "divisor8", "dropout": 0.2, "step_size": False,
}  # fmt: skip
_EFFICIENTNET = _IMAGES | {"norm_eps": 1e-3, "drop_path": 0.2}

MEMBERS = {
    "mobilenetv2": Member(
        mobilenetv2, (1, 2, 3, 4, 3, 3, 1), "Sandler et al., CVPR 2018, table 2", _IMAGES,
        also=("tail",), torchvision="mobilenet_v2", timm="mobilenetv2_100",
    ),
    "efficientnetv2_s": Member(
        partial(efficientnetv2, stages=_S, stem=24, last=1280), (2, 4, 4, 6, 9, 15), "Tan and Le, ICML 2021, table 4",
        _EFFICIENTNET, also=("tail",), torchvision="efficientnet_v2_s", timm="efficientnetv2_s",
    ),
    "efficientnetv2_m": Member(
        partial(efficientnetv2, stages=_M, stem=24, last=1280), (3, 5, 5, 7, 14, 18, 5),
        "Tan and Le, ICML 2021, released code", _EFFICIENTNET | {"dropout": 0.3},
        also=("tail",), torchvision="efficientnet_v2_m", timm="efficientnetv2_m",
    ),
    "efficientnetv2_cifar": Member(
        partial(efficientnetv2, stages=_CIFAR, stem=16, last=640), (1, 2, 2, 3, 5), "of this project, for 32x32",
        _EFFICIENTNET | {"num_classes": 10, "image_size": 32, "stem": "cifar"}, also=("tail",),
    ),
}  # fmt: skip
