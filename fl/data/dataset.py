"""The form that every data set has once it is loaded: uint8 images and labels, resident on one device."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Dataset:
    """Images and labels of the training set (which clients share out) and of the common test set.

    Attributes:
        x, y: training images, uint8 [N, C, H, W], and labels, int64 [N] from 0 to classes - 1.
        test_x, test_y: the same for the test set.
        classes: number of classes.
        top: the largest pixel value, which becomes 1 (0 becomes -1): normalisation with mean = std = 0.5,
            as FedMR's released code does for every data set.
        owners: the natural owner (e.g. writer) of each training sample, int64 [N], on the CPU; None where a data
            set names none.
    """

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    top: int = 255
    owners: Tensor | None = None

    def normalise(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """uint8 images of any leading shape -> floats in [-1, 1].

        >>> from fl.data import load
        >>> load("digits").normalise(torch.tensor([0, 8, 16], dtype=torch.uint8))
        tensor([-1.,  0.,  1.])
        """
        return images.to(dtype).mul_(2 / self.top).sub_(1)

    def to(self, device: torch.device | str) -> "Dataset":
        """The same data on another device; owners, which only partitions read, stay on the CPU."""
        tensors = {k: getattr(self, k).to(device) for k in ("x", "y", "test_x", "test_y")}
        return replace(self, **tensors)
