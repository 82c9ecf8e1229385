"""VGG with batch norm.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (ICLR 2015), table 1,
configurations A, B, D and E; `norm="none"` gives the paper's own.

Five sections of 3x3 convolutions, each followed by 2x2 max pooling, and three fully connected layers. For images of
224x224 and larger these get 7x7 positions, as in the paper, and fewer for smaller images: one for 32x32, as in FedMR
and FlexiFed. The two hidden ones share a width rate of their own, which comes after those of the sections.
"""

from collections import OrderedDict

from torch import nn

from zoo.errors import ZooError
from zoo.layers import Network
from zoo.spec import COMMON, Member, Spec


class VGG(Network):
    """section1, pool1, ..., section5, pool5, pool, flatten, classifier, head; build it with `zoo.create`."""


def vgg(spec: Spec) -> VGG:
    """Build a VGG."""
    side = spec.image_size
    if side < 32:
        raise ZooError(
            f"{spec.name} halves its input five times and needs images of 32x32 or larger, got {side}x{side}"
        )
    parts: dict[str, nn.Module] = {}
    channels = spec.in_channels
    for i, (full, depth) in enumerate(zip((64, 128, 256, 512, 512), spec.blocks), start=1):
        kit, blocks = spec.kit(f"section{i}"), []
        for _ in range(depth):
            blocks.append(kit.conv_norm(channels, kit.channels(full), 3, activation=nn.ReLU, bias=True))
            channels = kit.channels(full)
        parts |= {f"section{i}": nn.Sequential(*blocks), f"pool{i}": nn.MaxPool2d(2)}
    side = min(7, side // 32)
    kit = spec.kit("classifier")
    hidden, classifier = kit.channels(4096), OrderedDict[str, nn.Module]()
    for i, inputs in enumerate((channels * side**2, hidden), start=1):
        classifier |= {f"fc{i}": nn.Linear(inputs, hidden), f"scaler{i}": kit.scaler(), f"relu{i}": nn.ReLU()}
        classifier[f"dropout{i}"] = nn.Dropout(spec.dropout)
    parts |= {"pool": nn.AdaptiveAvgPool2d(side), "flatten": nn.Flatten()}
    parts |= {"classifier": nn.Sequential(classifier), "head": nn.Linear(hidden, spec.num_classes)}
    return VGG(OrderedDict(parts))


_IMAGES = COMMON | {"num_classes": 1000, "in_channels": 3, "image_size": 224, "norm": "batch", "dropout": 0.5}

MEMBERS = {
    name: Member(
        vgg, depth, "Simonyan and Zisserman, ICLR 2015, table 1", _IMAGES,
        also=("classifier",), torchvision=f"{name}_bn", torchvision_plain=name,
    )
    for name, depth in (
        ("vgg11", (1, 1, 2, 2, 2)), ("vgg13", (2, 2, 2, 2, 2)), ("vgg16", (2, 2, 3, 3, 3)), ("vgg19", (2, 2, 4, 4, 4)),
    )
}  # fmt: skip
