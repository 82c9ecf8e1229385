"""The convolutional network of McMahan et al., "Communication-Efficient Learning of Deep Networks from
Decentralized Data" (AISTATS 2017), section 3: two 5x5 convolutions (32 and 64 channels), each followed by
ReLU and 2x2 max pooling, a fully connected layer of 512 units and the classifier.
At 28x28x1 and 10 classes it has the paper's 1,663,370 parameters.
"""

from collections import OrderedDict
from typing import TYPE_CHECKING

from torch import nn

from zoo.errors import ZooError
from zoo.member import Member
from zoo.network import Network

if TYPE_CHECKING:
    from zoo.spec import Spec


class CNN(Network):
    """conv1, norm1, ..., conv2, norm2, ..., fc1, ..., fc2; build it with `zoo.create`."""

    torch_init = True


def cnn(spec: "Spec") -> CNN:
    """Three widths: of the two convolutions and of the hidden fully connected layer."""
    side = spec.image_size
    if side < 4:
        raise ZooError(f"cnn halves its input twice and needs images of 4x4 or larger, got {side}x{side}")
    conv1, conv2, fc1 = (spec.kit(name) for name in ("conv1", "conv2", "fc1"))
    a, b, c = spec.channels(32, "conv1"), spec.channels(64, "conv2"), spec.channels(512, "fc1")
    parts = {
        "conv1": conv1.conv(spec.in_channels, a, 5), "scaler1": conv1.scaler(), "norm1": conv1.make_norm(a),
        "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(2),
        "conv2": conv2.conv(a, b, 5), "scaler2": conv2.scaler(), "norm2": conv2.make_norm(b),
        "relu2": nn.ReLU(), "pool2": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(b * (side // 4) ** 2, c), "scaler3": fc1.scaler(), "relu3": nn.ReLU(),
        "fc2": nn.Linear(c, spec.num_classes),
    }  # fmt: skip
    return CNN(OrderedDict((name, part) for name, part in parts.items() if type(part) is not nn.Identity))


_DEFAULTS = {"num_classes": 10, "in_channels": 1, "image_size": 28, "norm": "none"}

MEMBERS = {"cnn": Member(cnn, (), ("conv1", "conv2", "fc1"), _DEFAULTS, "McMahan et al., AISTATS 2017, section 3")}
