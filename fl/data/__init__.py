"""Real data sets, resident on one device as uint8 tensors.

`digits` comes with scikit-learn; the others read a folder (`--data-root`): torchvision's own classes, LEAF's FEMNIST
with its writers as natural owners, and Tiny-ImageNet.

    dataset.py            Dataset, the form of all of them
    digits.py             digits
    torchvision_sets.py   mnist, fashion-mnist, emnist-*, cifar10, cifar100, cifar100-coarse
    femnist.py            femnist
    tiny_imagenet.py      tiny-imagenet
    source.py             where files are expected; errors about missing and damaged ones
    __main__.py           `python -m fl.data`: who holds what
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fl.data import digits, femnist, tiny_imagenet, torchvision_sets
from fl.data.dataset import Dataset
from fl.errors import FLError

__all__ = ["DATASETS", "Dataset", "default_root", "load"]

DATASETS: dict[str, Callable[[Path, bool], Dataset]] = {
    "digits": digits.load,
    "mnist": torchvision_sets.mnist,
    "fashion-mnist": torchvision_sets.fashion_mnist,
    **{f"emnist-{split}": partial(torchvision_sets.emnist, split=split) for split in torchvision_sets.EMNIST_LABELS},
    "cifar10": torchvision_sets.cifar10,
    "cifar100": torchvision_sets.cifar100,
    "cifar100-coarse": torchvision_sets.cifar100_coarse,
    "femnist": femnist.load,
    "tiny-imagenet": tiny_imagenet.load,
}
"""Name -> function of (root, download) that loads it; a data set of your own can be added."""


def load(name: str, root: str | Path | None = None, download: bool = True) -> Dataset:
    """Load a data set by name.

    Args:
        name: one of DATASETS.
        root: the folder that torchvision's class gets, or that holds femnist/ or tiny-imagenet-200/; None is
            $FL_DATA_ROOT, else ~/.cache/layer-surgery. digits needs none.
        download: fetch what is missing, if there is a network (femnist has no download).

    Raises:
        FLError: for an unknown name, or files that are missing or damaged; it says which are expected where.

    >>> load("digits").x.shape
    torch.Size([1437, 1, 8, 8])
    """
    if name not in DATASETS:
        raise FLError(f"unknown data set {name!r}: there are {', '.join(DATASETS)}")
    return DATASETS[name](Path(root).expanduser() if root else default_root(), download)


def default_root() -> Path:
    """Where data sets are looked for when no folder is given: $FL_DATA_ROOT, else ~/.cache/layer-surgery."""
    return Path(os.environ.get("FL_DATA_ROOT") or "~/.cache/layer-surgery").expanduser()
