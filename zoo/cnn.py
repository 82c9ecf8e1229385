"""The convolutional network of federated averaging, and LeNet.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017), section 3:
two 5x5 convolutions (32 and 64 channels), each followed by ReLU and 2x2 max pooling, a fully connected layer of 512
units and the classifier. At 28x28x1 and 10 classes it has the paper's 1,663,370 parameters. The smaller LeNet is what
FedMR's released code trains and calls by the name of that network.
"""

from torch import nn

from zoo.errors import ZooError
from zoo.layers import Network, without_identities
from zoo.spec import COMMON, Member, Spec


class CNN(Network):
    """conv1, norm1, ..., conv2, norm2, ..., fc1, ..., fc2; build it with `zoo.create`."""

    torch_init = True


def cnn(spec: Spec) -> CNN:
    """Build the CNN. Its three widths are those of the two convolutions and of the hidden fully connected layer."""
    side = spec.image_size
    if side < 4:
        raise ZooError(f"cnn halves its input twice and needs images of 4x4 or larger, got {side}x{side}")
    conv1, conv2, fc1 = (spec.kit(name) for name in ("conv1", "conv2", "fc1"))
    a, b, c = conv1.channels(32), conv2.channels(64), fc1.channels(512)
    parts = {
        "conv1": conv1.conv(spec.in_channels, a, 5), "scaler1": conv1.scaler(), "norm1": conv1.make_norm(a),
        "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(2),
        "conv2": conv2.conv(a, b, 5), "scaler2": conv2.scaler(), "norm2": conv2.make_norm(b),
        "relu2": nn.ReLU(), "pool2": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(b * (side // 4) ** 2, c), "scaler3": fc1.scaler(), "relu3": nn.ReLU(),
        "fc2": nn.Linear(c, spec.num_classes),
    }  # fmt: skip
    return CNN(without_identities(parts))


def lenet(spec: Spec) -> CNN:
    """Build LeNet-5 (LeCun et al., Proceedings of the IEEE 1998) with ReLU and max pooling.

    Its four widths are those of two unpadded 5x5 convolutions (6 and 16 channels) and of two hidden layers (120 and 84
    units). 62,006 parameters at 32x32x3 and 10 classes.
    """
    if spec.image_size < 16:
        raise ZooError(f"lenet needs images of 16x16 or larger, got {spec.image_size}x{spec.image_size}")
    conv1, conv2, fc1, fc2 = (spec.kit(name) for name in ("conv1", "conv2", "fc1", "fc2"))
    a, b, c, d = conv1.channels(6), conv2.channels(16), fc1.channels(120), fc2.channels(84)
    side, bias = ((spec.image_size - 4) // 2 - 4) // 2, spec.norm == "none"
    parts = {
        "conv1": nn.Conv2d(spec.in_channels, a, 5, bias=bias),
        "scaler1": conv1.scaler(), "norm1": conv1.make_norm(a), "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(a, b, 5, bias=bias),
        "scaler2": conv2.scaler(), "norm2": conv2.make_norm(b), "relu2": nn.ReLU(), "pool2": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(b * side**2, c), "scaler3": fc1.scaler(), "relu3": nn.ReLU(),
        "fc2": nn.Linear(c, d), "scaler4": fc2.scaler(), "relu4": nn.ReLU(),
        "fc3": nn.Linear(d, spec.num_classes),
    }  # fmt: skip
    return CNN(without_identities(parts))


MEMBERS = {
    "cnn": Member(
        cnn, (), "McMahan et al., AISTATS 2017, section 3",
        COMMON | {"num_classes": 10, "in_channels": 1, "image_size": 28, "norm": "none"},
        also=("conv1", "conv2", "fc1"),
    ),
    "lenet": Member(
        lenet, (), "LeCun et al., Proc. IEEE 1998; FedMR's code",
        COMMON | {"num_classes": 10, "in_channels": 3, "image_size": 32, "norm": "none"},
        also=("conv1", "conv2", "fc1", "fc2"),
    ),
}  # fmt: skip
