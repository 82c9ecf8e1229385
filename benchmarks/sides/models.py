"""The models of the settings, in plain PyTorch, so that every side builds the same ones."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch.nn.functional as F
from torch import Tensor, nn


def pfl_cnn(dropout: bool) -> nn.Module:
    """Return the CNN of pfl-research's CIFAR-10 benchmark."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(),
        nn.Conv2d(32, 64, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Dropout(0.25 * dropout),
        nn.Flatten(), nn.Linear(12544, 128), nn.ReLU(), nn.Dropout(0.5 * dropout),
        nn.Linear(128, 10),
    )  # fmt: skip


def lenet(dropout: bool) -> nn.Module:
    """Return a network of LeNet-5's size, with ReLU and max pooling."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(400, 120), nn.ReLU(),
        nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, 10),
    )  # fmt: skip


def mcmahan_cnn(dropout: bool, part: int = 1) -> nn.Module:
    """The CNN of McMahan et al. (AISTATS 2017), as `zoo.create("cnn")`, or a part of its widths: 4 is a quarter."""
    return nn.Sequential(
        nn.Conv2d(1, 32 // part, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32 // part, 64 // part, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(3136 // part, 512 // part), nn.ReLU(),
        nn.Linear(512 // part, 10),
    )  # fmt: skip


class BasicBlock(nn.Module):
    """conv-norm-ReLU-conv-norm plus a shortcut without parameters, then ReLU."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.stride, self.more = stride, channels - inputs

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.more:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return F.relu(x + out)


def resnet20(dropout: bool) -> nn.Module:
    """Return the ResNet-20 of He et al. (CVPR 2016) for CIFAR-10, as `zoo.create("resnet20")`."""
    widths = [16] * 4 + [32] * 3 + [64] * 3
    blocks = [BasicBlock(a, b, 1 + (a != b)) for a, b in pairwise(widths)]
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


MODELS: dict[str, Callable[[bool], nn.Module]] = {
    "pfl_cnn": pfl_cnn,
    "lenet": lenet,
    "mcmahan_cnn": mcmahan_cnn,
    "quarter_cnn": partial(mcmahan_cnn, part=4),
    "resnet20": resnet20,
}
"""Name -> function of whether the model has its dropout (only one of them has any)."""
