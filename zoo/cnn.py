"""The convolutional network of federated averaging, and LeNet.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data" (AISTATS 2017), section 3:
two 5x5 convolutions (32 and 64 channels), each followed by ReLU and 2x2 max pooling, a fully connected layer of 512
units and the classifier. At 28x28x1 and 10 classes it has the paper's 1,663,370 parameters. The smaller LeNet is what
FedMR's released code trains and calls by the name of that network.
"""

from collections.abc import Sequence

from torch import nn

from zoo.architecture import Architecture, Rounding
from zoo.errors import ZooError
from zoo.layers import Network, without_identities
from zoo.norms import Norm


class CNN(Network):
    """conv1, norm1, ..., conv2, norm2, ..., fc1, ..., fc2.

    Args:
        width: one rate, or one for each of the two convolutions and the hidden fully connected layer.

    >>> sum(parameter.numel() for parameter in CNN().parameters())
    1663370
    """

    torch_init = True
    extra_rates = ("conv1", "conv2", "fc1")

    def __init__(
        self, *, num_classes: int = 10, in_channels: int = 1, image_size: int = 28,
        width: float | Sequence[float] = 1.0, norm: Norm = "none", norm_eps: float = 1e-5,
        rounding: Rounding = "ceil", scaler: bool = False,
    ) -> None:  # fmt: skip
        self.check(num_classes=num_classes, in_channels=in_channels, image_size=image_size)
        if image_size < 4:
            raise ZooError(f"images of a CNN must be 4x4 or larger, got {image_size}x{image_size}", code="argument")
        conv1, conv2, fc1 = self.builders(width, norm=norm, norm_eps=norm_eps, rounding=rounding, scaler=scaler)
        a, b, c = conv1.channels(32), conv2.channels(64), fc1.channels(512)
        parts = {
            "conv1": conv1.conv(in_channels, a, 5), "scaler1": conv1.make_scaler(), "norm1": conv1.make_norm(a),
            "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(2),
            "conv2": conv2.conv(a, b, 5), "scaler2": conv2.make_scaler(), "norm2": conv2.make_norm(b),
            "relu2": nn.ReLU(), "pool2": nn.MaxPool2d(2),
            "flatten": nn.Flatten(),
            "fc1": nn.Linear(b * (image_size // 4) ** 2, c), "scaler3": fc1.make_scaler(), "relu3": nn.ReLU(),
            "fc2": nn.Linear(c, num_classes),
        }  # fmt: skip
        super().__init__(without_identities(parts))


class LeNet(Network):
    """LeNet-5 (LeCun et al., Proceedings of the IEEE 1998) with ReLU and max pooling.

    Args:
        width: one rate, or one for each of two unpadded 5x5 convolutions (6 and 16 channels) and of two hidden layers
            (120 and 84 units).

    >>> sum(parameter.numel() for parameter in LeNet().parameters())
    62006
    """

    torch_init = True
    extra_rates = ("conv1", "conv2", "fc1", "fc2")

    def __init__(
        self, *, num_classes: int = 10, in_channels: int = 3, image_size: int = 32,
        width: float | Sequence[float] = 1.0, norm: Norm = "none", norm_eps: float = 1e-5,
        rounding: Rounding = "ceil", scaler: bool = False,
    ) -> None:  # fmt: skip
        self.check(num_classes=num_classes, in_channels=in_channels, image_size=image_size)
        if image_size < 16:
            raise ZooError(f"images of a LeNet must be 16x16 or larger, got {image_size}x{image_size}", code="argument")
        conv1, conv2, fc1, fc2 = self.builders(width, norm=norm, norm_eps=norm_eps, rounding=rounding, scaler=scaler)
        a, b, c, d = conv1.channels(6), conv2.channels(16), fc1.channels(120), fc2.channels(84)
        side, bias = ((image_size - 4) // 2 - 4) // 2, norm == "none"
        parts = {
            "conv1": nn.Conv2d(in_channels, a, 5, bias=bias), "scaler1": conv1.make_scaler(),
            "norm1": conv1.make_norm(a), "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(2),
            "conv2": nn.Conv2d(a, b, 5, bias=bias), "scaler2": conv2.make_scaler(),
            "norm2": conv2.make_norm(b), "relu2": nn.ReLU(), "pool2": nn.MaxPool2d(2),
            "flatten": nn.Flatten(),
            "fc1": nn.Linear(b * side**2, c), "scaler3": fc1.make_scaler(), "relu3": nn.ReLU(),
            "fc2": nn.Linear(c, d), "scaler4": fc2.make_scaler(), "relu4": nn.ReLU(),
            "fc3": nn.Linear(d, num_classes),
        }  # fmt: skip
        super().__init__(without_identities(parts))


PRESETS = {
    "cnn": Architecture(CNN, {}, "McMahan et al., AISTATS 2017, section 3"),
    "lenet": Architecture(LeNet, {}, "LeCun et al., Proc. IEEE 1998; FedMR's code"),
}
