"""Real data sets, resident on one device as uint8 tensors.

`digits` comes with scikit-learn; the others are torchvision's own classes reading a folder (`--data-root`).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fl.errors import FLError


@dataclass(frozen=True)
class Dataset:
    """Images and labels of the training set (which clients share out) and of the common test set.

    Attributes:
        x, y: training images, uint8 [N, C, H, W], and labels, int64 [N].
        test_x, test_y: the same for the test set.
        classes: number of classes.
        top: the largest pixel value, which becomes 1 (0 becomes -1): normalisation with mean = std = 0.5,
            as FedMR's released code does for every data set.
    """

    name: str
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    classes: int
    top: int = 255

    def normalise(self, images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """uint8 images of any leading shape -> floats in [-1, 1].

        >>> load("digits").normalise(torch.tensor([0, 8, 16], dtype=torch.uint8))
        tensor([-1.,  0.,  1.])
        """
        return images.to(dtype).mul_(2 / self.top).sub_(1)

    def to(self, device: torch.device | str) -> "Dataset":
        """The same data on another device."""
        tensors = {k: getattr(self, k).to(device) for k in ("x", "y", "test_x", "test_y")}
        return replace(self, **tensors)


def load(name: str, root: str | Path | None = None, download: bool = True) -> Dataset:
    """Load a data set by name.

    Args:
        name: digits, fashion-mnist or cifar10.
        root: the folder that torchvision's class gets; None is $FL_DATA_ROOT, else ~/.cache/layer-surgery.
            digits needs none.
        download: fetch what is missing, if there is a network.

    Raises:
        FLError: for an unknown name, or files that are missing; it says which are expected where.

    >>> load("digits").x.shape
    torch.Size([1437, 1, 8, 8])
    """
    if name not in DATASETS:
        raise FLError(f"unknown data set {name!r}: there are {', '.join(DATASETS)}")
    return DATASETS[name](Path(root).expanduser() if root else default_root(), download)


def default_root() -> Path:
    """Where data sets are looked for when no folder is given."""
    return Path(os.environ.get("FL_DATA_ROOT") or "~/.cache/layer-surgery").expanduser()


def _digits(root: Path, download: bool) -> Dataset:
    """1,797 handwritten digits of 8x8 pixels with 17 grey levels; every fifth, stratified by class, is test data."""
    del root, download
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.reshape(-1, 1, 8, 8), labels, test_size=0.2, stratify=labels, random_state=0)
    x, test_x, y, test_y = map(torch.from_numpy, parts)
    return Dataset("digits", x.byte(), y.long(), test_x.byte(), test_y.long(), classes=10, top=16)


def _fashion_mnist(root: Path, download: bool) -> Dataset:
    from torchvision.datasets import FashionMNIST

    files = [f"FashionMNIST/raw/{part}-ubyte" for part in (
        "train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"
    )]  # fmt: skip
    train, test = _from_torchvision(FashionMNIST, "Fashion-MNIST", files, root, download)
    return Dataset(
        "fashion-mnist",
        train.data.unsqueeze(1),
        train.targets,
        test.data.unsqueeze(1),
        test.targets,
        classes=10,
    )


def _cifar10(root: Path, download: bool) -> Dataset:
    from torchvision.datasets import CIFAR10

    batches = [f"data_batch_{i}" for i in range(1, 6)]
    files = [f"cifar-10-batches-py/{part}" for part in (*batches, "test_batch", "batches.meta")]
    train, test = _from_torchvision(CIFAR10, "CIFAR-10", files, root, download)
    x, test_x = (torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous() for part in (train, test))
    return Dataset("cifar10", x, torch.tensor(train.targets), test_x, torch.tensor(test.targets), classes=10)


def _from_torchvision(cls: Callable, title: str, files: list[str], root: Path, download: bool):
    """(train, test) from torchvision's class: files that are there first, then a download."""
    missing = [file for file in files if not (root / file).exists()]
    if missing and not download:
        raise _absent(title, files, root, f"missing {', '.join(missing)}; download is off")
    try:
        train, test = (cls(root, train=part, download=bool(missing)) for part in (True, False))
    except Exception as error:  # torchvision raises many kinds, down to AssertionError, for what it cannot read
        reason = " ".join(str(error).split()) or type(error).__name__
        what = f"missing {', '.join(missing)}; download failed" if missing else "files are damaged"
        raise _absent(title, files, root, f"{what} ({reason})") from error
    if len(train.data) != len(train.targets) or len(test.data) != len(test.targets):
        raise _absent(title, files, root, "files are damaged (more images than labels, or fewer)")
    return train, test


def _absent(title: str, files: list[str], root: Path, what: str) -> FLError:
    return FLError(
        f"{title} cannot be read from {root}: {what}. Expected there: {', '.join(files)}. Name the folder that holds "
        "them with --data-root or FL_DATA_ROOT"
    )


DATASETS: dict[str, Callable[[Path, bool], Dataset]] = {
    "digits": _digits,
    "fashion-mnist": _fashion_mnist,
    "cifar10": _cifar10,
}
