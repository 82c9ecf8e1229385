"""MobileNetV2: Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks" (CVPR 2018), table 2.

For small images (`stem="cifar"`) the stem and the second section keep the image's size.

At width rates below 1 the paper leaves the last convolution at 1280 channels. Here a single rate narrows it, too, so
that all of a narrow model is small. It also has a rate of its own, the last one: `width=(0.5,) * 7 + (1,)` is the
paper's 0.5.
"""

from collections import OrderedDict

from torch import Tensor, nn

from zoo.blueprint import Blueprint
from zoo.kit import GlobalPool, Kit
from zoo.member import Member, section_names
from zoo.network import Network

# Table 2: expansion t, channels c, stride s; the numbers of blocks are the member's depth.
_SECTIONS = ((1, 16, 1), (6, 24, 2), (6, 32, 2), (6, 64, 2), (6, 96, 1), (6, 160, 2), (6, 320, 1))
_STEM, _LAST = 32, 1280


class MobileNetV2(Network):
    """stem, section1, ..., section7, tail, pool, dropout, head; build it with `zoo.create`."""


class InvertedResidual(nn.Module):
    """1x1 up, 3x3 depthwise, 1x1 down without activation; plus the shortcut if the shape stays the same (figure 4d)."""

    def __init__(self, inputs: int, channels: int, expansion: int, stride: int, residual: bool, kit: Kit) -> None:
        super().__init__()
        hidden = inputs * expansion
        steps: OrderedDict[str, nn.Module] = OrderedDict()
        if expansion > 1:
            steps["expand"] = kit.conv_norm(inputs, hidden, 1, activation=nn.ReLU6)
        steps["depthwise"] = kit.conv_norm(hidden, hidden, 3, stride, groups=hidden, activation=nn.ReLU6)
        steps["project"] = kit.conv_norm(hidden, channels, 1)
        self.branch = nn.Sequential(steps)
        self.add = kit.residual() if residual else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.branch(x)
        return out if self.add is None else self.add(x, out)


def mobilenetv2(spec: Blueprint) -> MobileNetV2:
    """Build a MobileNetV2."""
    small = spec.stem == "cifar"
    channels = spec.channels(_STEM, "section1")
    stem = spec.kit("section1").conv_norm(spec.in_channels, channels, 3, 1 if small else 2, activation=nn.ReLU6)
    parts: dict[str, nn.Module] = {"stem": stem}
    for i, ((expansion, full, stride), depth) in enumerate(zip(_SECTIONS, spec.depth), start=1):
        name = f"section{i}"
        width, kit = spec.channels(full, name), spec.kit(name)
        blocks = []
        for j in range(depth):
            step = stride if j == 0 and not (small and i == 2) else 1
            blocks.append(InvertedResidual(channels, width, expansion, step, residual=j > 0, kit=kit))
            channels = width
        parts[name] = nn.Sequential(*blocks)
    last = spec.channels(_LAST, "tail")
    parts["tail"] = spec.kit("tail").conv_norm(channels, last, 1, activation=nn.ReLU6)
    parts |= {"pool": GlobalPool(), "dropout": nn.Dropout(spec.dropout), "head": nn.Linear(last, spec.num_classes)}
    return MobileNetV2(OrderedDict(parts))


MEMBERS = {
    "mobilenetv2": Member(
        mobilenetv2,
        depth=(1, 2, 3, 4, 3, 3, 1),
        rated_parts=(*section_names(7), "tail"),
        defaults={
            "num_classes": 1000,
            "in_channels": 3,
            "image_size": 224,
            "stem": "imagenet",
            "norm": "batch",
            "rounding": "divisor8",
            "dropout": 0.2,
            "step_size": False,
        },
        source="Sandler et al., CVPR 2018, table 2",
    )
}
