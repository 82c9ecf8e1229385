"""The convolutional network of McMahan et al., "Communication-Efficient Learning of Deep Networks from
Decentralized Data" (AISTATS 2017), section 3: two 5x5 convolutions (32 and 64 channels), each followed by
ReLU and 2x2 max pooling, a fully connected layer of 512 units and the classifier.
At 28x28x1 and 10 classes it has the paper's 1,663,370 parameters.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.errors import ZooError
from zoo.norms import Norm, make_norm, scaled


class CNN(nn.Module):
    """See the module's docstring; build it with `cnn`."""

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        image_size: int,
        channels: tuple[int, int],
        hidden: int,
        norm: Norm,
    ) -> None:
        super().__init__()
        bias = norm == "none"
        self.conv1 = nn.Conv2d(in_channels, channels[0], 5, padding=2, bias=bias)
        self.norm1 = make_norm(norm, channels[0])
        self.conv2 = nn.Conv2d(channels[0], channels[1], 5, padding=2, bias=bias)
        self.norm2 = make_norm(norm, channels[1])
        self.fc1 = nn.Linear(channels[1] * (image_size // 4) ** 2, hidden)
        self.fc2 = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(x))), 2)
        x = F.max_pool2d(F.relu(self.norm2(self.conv2(x))), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def cnn(
    num_classes: int = 10,
    in_channels: int = 1,
    image_size: int = 28,
    width: float = 1.0,
    norm: Norm | None = None,
) -> CNN:
    """McMahan's CNN for square images [N, in_channels, image_size, image_size] -> logits [N, num_classes].

    Args:
        image_size: side of the images, at least 4 (two poolings).
        width: rate of the hidden widths 32, 64 and 512.
        norm: after each convolution; None is the paper's choice, none.

    >>> sum(p.numel() for p in cnn().parameters())
    1663370
    """
    if image_size < 4:
        raise ZooError(f"cnn halves its input twice and needs images of 4x4 or larger, got {image_size}x{image_size}")
    channels = (scaled(32, width), scaled(64, width))
    return CNN(num_classes, in_channels, image_size, channels, scaled(512, width), norm or "none")
