"""VGG with batch norm.

Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition" (ICLR 2015), table 1,
configurations A, B, D and E; `norm="none"` gives the paper's own.

Five sections of 3x3 convolutions, each followed by 2x2 max pooling, and three fully connected layers. For images of
224x224 and larger these get 7x7 positions, as in the paper, and fewer for smaller images: one for 32x32, as in FedMR
and FlexiFed. The two hidden ones share a width rate of their own, which comes after the sections' rates.
"""

from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from zoo.architecture import Architecture, Rounding, check_depths
from zoo.errors import ZooError
from zoo.layers import Network
from zoo.norms import Norm


class VGG(Network):
    """section1, pool1, ..., section5, pool5, pool, flatten, classifier, head.

    Args:
        depths: convolutions of each of the five sections; one number is for all.
        width: one rate, one for each section, or one for each section and the fully connected layers.

    >>> net = VGG((1, 1, 2, 2, 2), num_classes=10, image_size=32, width=0.1)
    >>> net.classifier.fc1
    Linear(in_features=52, out_features=410, bias=True)
    """

    extra_rates = ("classifier",)

    def __init__(
        self, depths: int | Sequence[int], *, num_classes: int = 1000, in_channels: int = 3, image_size: int = 224,
        dropout: float = 0.5, width: float | Sequence[float] = 1.0, norm: Norm = "batch", norm_eps: float = 1e-5,
        rounding: Rounding = "ceil", scaler: bool = False,
    ) -> None:  # fmt: skip
        self.check(num_classes=num_classes, in_channels=in_channels, image_size=image_size, dropout=dropout)
        depths = check_depths(type(self).__name__, depths, 5)
        if image_size < 32:
            raise ZooError(f"images of a VGG must be 32x32 or larger, got {image_size}x{image_size}", code="argument")
        *builders, last = self.builders(width, 5, norm=norm, norm_eps=norm_eps, rounding=rounding, scaler=scaler)
        parts: dict[str, nn.Module] = {}
        channels = in_channels
        for i, (builder, full, depth) in enumerate(zip(builders, (64, 128, 256, 512, 512), depths), start=1):
            section = []
            for _ in range(depth):
                section.append(builder.conv_norm(channels, builder.channels(full), 3, activation=nn.ReLU, bias=True))
                channels = builder.channels(full)
            parts |= {f"section{i}": nn.Sequential(*section), f"pool{i}": nn.MaxPool2d(2)}
        side, hidden = min(7, image_size // 32), last.channels(4096)
        classifier = OrderedDict[str, nn.Module]()
        for i, inputs in enumerate((channels * side**2, hidden), start=1):
            classifier |= {f"fc{i}": nn.Linear(inputs, hidden), f"scaler{i}": last.make_scaler()}
            classifier |= {f"relu{i}": nn.ReLU(), f"dropout{i}": nn.Dropout(dropout)}
        parts |= {"pool": nn.AdaptiveAvgPool2d(side), "flatten": nn.Flatten()}
        parts |= {"classifier": nn.Sequential(classifier), "head": nn.Linear(hidden, num_classes)}
        super().__init__(parts)


PRESETS = {
    name: Architecture(
        VGG, {"depths": depths}, "Simonyan and Zisserman, ICLR 2015, table 1",
        torchvision=f"{name}_bn", torchvision_plain=name,
    )
    for name, depths in (
        ("vgg11", (1, 1, 2, 2, 2)), ("vgg13", (2, 2, 2, 2, 2)), ("vgg16", (2, 2, 3, 3, 3)), ("vgg19", (2, 2, 4, 4, 4)),
    )
}  # fmt: skip
