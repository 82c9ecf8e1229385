"""Scikit-learn's handwritten digits: real data that needs neither a folder nor a network."""

from pathlib import Path

import torch

from fl.data.dataset import Dataset
from fl.data.loader import Loader


def load(root: Path, download: bool) -> Dataset:
    """1,797 handwritten digits of 8x8 pixels with 17 grey levels; every fifth, stratified by class, is test data.

    Source: scikit-learn's `load_digits`, the test part of UCI's "Optical Recognition of Handwritten Digits".

    Args:
        root, download: unused, since the data comes with scikit-learn.

    Returns:
        x uint8 [1437, 1, 8, 8], test_x [360, 1, 8, 8], 10 classes, top = 16.

    >>> load(Path(), download=False).test_x.shape
    torch.Size([360, 1, 8, 8])
    """
    del root, download
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.reshape(-1, 1, 8, 8), labels, test_size=0.2, stratify=labels, random_state=0)
    x, test_x, y, test_y = map(torch.from_numpy, parts)
    return Dataset("digits", x.byte(), y.long(), test_x.byte(), test_y.long(), classes=10, top=16)


LOADERS = {"digits": Loader(load, bundled=True)}
