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
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from zoo.architecture import Architecture, Rounding, Stem, check_depths
from zoo.errors import ZooError
from zoo.layers import Builder, GlobalPool, Network
from zoo.norms import Norm

_KINDS = ("plain", "fused", "squeezed")


class Stage(NamedTuple):
    """A row of the papers' tables: blocks, expansion, channels, first stride."""

    kind: str
    expansion: int
    channels: int
    stride: int


class SqueezeExcitation(nn.Module):
    """Weights channels by a gate computed from all channels' means.

    See Hu et al., CVPR 2018.
    """

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
    """1x1 up, 3x3 depthwise, 1x1 down without activation; plus a fitting shortcut.

    MobileNetV2's blocks are `plain` (figure 4d). EfficientNetV2's squeeze the hidden channels to a quarter of the
    block's inputs, rounded down (`squeezed`), or have one full 3x3 convolution instead of the first two (`fused`;
    figure 2).
    """

    def __init__(
        self,
        inputs: int,
        channels: int,
        stage: Stage,
        stride: int,
        residual: bool,
        drop_path: float,
        builder: Builder,
    ) -> None:
        super().__init__()
        hidden = inputs * stage.expansion
        conv_norm = partial(builder.conv_norm, activation=nn.ReLU6 if stage.kind == "plain" else nn.SiLU)
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
            steps["project"] = builder.conv_norm(hidden, channels, 1)
        self.branch = nn.Sequential(steps)
        self.add = builder.residual(drop_path) if residual else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.branch(x)
        return out if self.add is None else self.add(x, out)


class InvertedResidualNetwork(Network):
    """stem, section1, section2, ..., tail, pool, dropout, head, as in both papers."""

    extra_rates = ("tail",)

    def __init__(
        self, stages: Sequence[Stage], depths: int | Sequence[int], stem_channels: int, last_channels: int,
        activation: type[nn.Module], *, num_classes: int, in_channels: int, stem: Stem, dropout: float,
        drop_path: float = 0.0, width: float | Sequence[float], **options: Any,
    ) -> None:  # fmt: skip
        self.check(num_classes=num_classes, in_channels=in_channels, stem=stem, dropout=dropout, drop_path=drop_path)
        self.check(stem_channels=stem_channels, last_channels=last_channels)
        if not stages or not all(isinstance(stage, Stage) and stage.kind in _KINDS for stage in stages):
            raise ZooError(f"stages are Stages, of kinds {', '.join(_KINDS)}, got {stages!r}", code="argument")
        for stage in stages:
            self.check(expansion=stage.expansion, channels=stage.channels, stride=stage.stride)
        depths = check_depths(type(self).__name__, depths, len(stages))
        *builders, tail = self.builders(width, len(stages), **options)
        previous, current, index = stem_channels, builders[0].channels(stem_channels), 0
        stride = 1 if stem == "cifar" else 2
        first = builders[0].conv_norm(in_channels, current, 3, stride, activation=activation)
        parts: dict[str, nn.Module] = {"stem": first}
        for i, (builder, stage, depth) in enumerate(zip(builders, stages, depths), start=1):
            section = []
            for stride in (stage.stride, *[1] * (depth - 1)):
                # by the full widths, so that rounding makes no difference
                residual = stride == 1 and previous == stage.channels
                channels, drop = builder.channels(stage.channels), drop_path * index / sum(depths)
                section.append(InvertedResidual(current, channels, stage, stride, residual, drop, builder))
                previous, current, index = stage.channels, channels, index + 1
            parts[f"section{i}"] = nn.Sequential(*section)
        channels = tail.channels(last_channels)
        parts["tail"] = tail.conv_norm(current, channels, 1, activation=activation)
        parts |= {"pool": GlobalPool(), "dropout": nn.Dropout(dropout), "head": nn.Linear(channels, num_classes)}
        super().__init__(parts)


class MobileNetV2(InvertedResidualNetwork):
    """stem, section1, ..., section7, tail, pool, dropout, head.

    Args:
        depths: blocks of each section; one number is for all.
        width: one rate, one for each section, or one for each section and the last convolution.

    >>> net = MobileNetV2(num_classes=10, width=(0.5,) * 7 + (1,))
    >>> net.head
    Linear(in_features=1280, out_features=10, bias=True)
    """

    def __init__(
        self, depths: int | Sequence[int] = (1, 2, 3, 4, 3, 3, 1), *, num_classes: int = 1000, in_channels: int = 3,
        stem: Stem = "imagenet", dropout: float = 0.2, width: float | Sequence[float] = 1.0, norm: Norm = "batch",
        norm_eps: float = 1e-5, rounding: Rounding = "divisor8", scaler: bool = False, step_size: bool = False,
    ) -> None:  # fmt: skip
        stages = list(_MOBILENETV2)
        if stem == "cifar":
            stages[1] = stages[1]._replace(stride=1)
        super().__init__(
            stages, depths, 32, 1280, nn.ReLU6, num_classes=num_classes, in_channels=in_channels, stem=stem,
            dropout=dropout, width=width, norm=norm, norm_eps=norm_eps, rounding=rounding, scaler=scaler,
            step_size=step_size,
        )  # fmt: skip


class EfficientNetV2(InvertedResidualNetwork):
    """stem, section1, ..., tail, pool, dropout, head.

    Args:
        stages: the rows of the paper's table, one for each section.
        depths: blocks of each section; one number is for all.
        stem_channels, last_channels: of the first and the last convolution at full width.
        width: one rate, one for each section, or one for each section and the last convolution.

    >>> stages = [Stage("fused", 1, 16, 1), Stage("squeezed", 4, 32, 2)]
    >>> net = EfficientNetV2(stages, [1, 2], 16, 64, num_classes=10)
    >>> [len(net.section1), len(net.section2)], net.head.in_features
    ([1, 2], 64)
    """

    def __init__(
        self, stages: Sequence[Stage], depths: int | Sequence[int], stem_channels: int = 24,
        last_channels: int = 1280, *, num_classes: int = 1000, in_channels: int = 3, stem: Stem = "imagenet",
        dropout: float = 0.2, drop_path: float = 0.2, width: float | Sequence[float] = 1.0, norm: Norm = "batch",
        norm_eps: float = 1e-3, rounding: Rounding = "divisor8", scaler: bool = False, step_size: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(
            stages, depths, stem_channels, last_channels, nn.SiLU, num_classes=num_classes,
            in_channels=in_channels, stem=stem, dropout=dropout, drop_path=drop_path, width=width, norm=norm,
            norm_eps=norm_eps, rounding=rounding, scaler=scaler, step_size=step_size,
        )  # fmt: skip


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

_2021 = "Tan and Le, ICML 2021"

PRESETS = {
    "mobilenetv2": Architecture(
        MobileNetV2, {"depths": (1, 2, 3, 4, 3, 3, 1), "image_size": 224}, "Sandler et al., CVPR 2018, table 2",
        torchvision="mobilenet_v2", timm="mobilenetv2_100",
    ),
    "efficientnetv2_s": Architecture(
        EfficientNetV2, {"stages": _S, "depths": (2, 4, 4, 6, 9, 15), "image_size": 224}, f"{_2021}, table 4",
        torchvision="efficientnet_v2_s", timm="efficientnetv2_s",
    ),
    "efficientnetv2_m": Architecture(
        EfficientNetV2, {"stages": _M, "depths": (3, 5, 5, 7, 14, 18, 5), "image_size": 224, "dropout": 0.3},
        f"{_2021}, released code", torchvision="efficientnet_v2_m", timm="efficientnetv2_m",
    ),
    "efficientnetv2_cifar": Architecture(
        EfficientNetV2,
        {"stages": _CIFAR, "depths": (1, 2, 2, 3, 5), "stem_channels": 16, "last_channels": 640, "num_classes": 10,
         "image_size": 32, "stem": "cifar"},
        "of this project, for 32x32",
    ),
}  # fmt: skip
