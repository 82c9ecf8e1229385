"""ResNets for small images: He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016), section 4.2.

A 3x3 convolution, three sections of n basic blocks with 16, 32 and 64 channels, global average pooling and the
classifier: 6n + 2 layers. Shortcuts have no parameters (the paper's option A): where a section halves the image
and widens, the shortcut takes every second pixel and appends zero channels.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from zoo.norms import Norm, make_norm, scaled


class BasicBlock(nn.Module):
    """conv-norm-ReLU-conv-norm plus shortcut, then ReLU."""

    def __init__(self, in_channels: int, channels: int, stride: int, norm: Norm) -> None:
        super().__init__()
        bias = norm == "none"
        self.conv1 = nn.Conv2d(in_channels, channels, 3, stride, padding=1, bias=bias)
        self.norm1 = make_norm(norm, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=bias)
        self.norm2 = make_norm(norm, channels)
        self.stride, self.new_channels = stride, channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, 0, self.new_channels)) if self.new_channels else x


class ResNet(nn.Module):
    """See the module's docstring; build it with `resnet20`."""

    def __init__(
        self,
        num_classes: int,
        in_channels: int,
        channels: tuple[int, int, int],
        depth: tuple[int, int, int],
        norm: Norm,
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels[0], 3, padding=1, bias=norm == "none")
        self.norm1 = make_norm(norm, channels[0])
        self.section1 = self._section(channels[0], channels[0], depth[0], 1, norm)
        self.section2 = self._section(channels[0], channels[1], depth[1], 2, norm)
        self.section3 = self._section(channels[1], channels[2], depth[2], 2, norm)
        self.fc = nn.Linear(channels[2], num_classes)

    @staticmethod
    def _section(in_channels: int, channels: int, blocks: int, stride: int, norm: Norm) -> nn.Sequential:
        first = BasicBlock(in_channels, channels, stride, norm)
        return nn.Sequential(first, *(BasicBlock(channels, channels, 1, norm) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = self.section3(self.section2(self.section1(x)))
        return self.fc(x.mean((2, 3)))


def resnet20(
    num_classes: int = 10,
    in_channels: int = 3,
    image_size: int | None = None,
    width: float = 1.0,
    norm: Norm | None = None,
) -> ResNet:
    """ResNet-20 for images [N, in_channels, H, W] of any size -> logits [N, num_classes].

    Args:
        image_size: taken so that all factories have one signature; the head pools globally, so that any
            size will do.
        width: rate of the widths 16, 32 and 64.
        norm: None is the paper's choice, batch.

    >>> sum(p.numel() for p in resnet20().parameters())
    269722
    """
    del image_size
    channels = (scaled(16, width), scaled(32, width), scaled(64, width))
    return ResNet(num_classes, in_channels, channels, (3, 3, 3), norm or "batch")
