"""Images that come with scikit-learn (digits), or that torchvision's own classes read and download: the MNIST family,
EMNIST, CIFAR-10 and CIFAR-100.

Every function here takes the folder that torchvision's class calls its root, and whether missing files may be
downloaded. Missing and damaged files are an FLError that names them and the folder.
"""

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl.base.errors import reason
from fl.data.dataset import Dataset
from fl.data.loader import DataFiles, Loader

EMNIST_LABELS = {"balanced": range(47), "byclass": range(62), "letters": range(1, 27), "digits": range(10)}
"""The splits of EMNIST, and the labels in their files. Only the labels of `letters` do not start at 0."""


def digits(root: Path, download: bool) -> Dataset:
    """Load 1,797 handwritten digits of 8x8 pixels with 17 grey levels.

    Every fifth, stratified by class, is test data. Source: scikit-learn's `load_digits`, the test part of UCI's
    "Optical Recognition of Handwritten Digits".

    Returns:
        x uint8 [1437, 1, 8, 8], test_x [360, 1, 8, 8], 10 classes, top = 16.
    """
    del root, download
    # The file is scikit-learn's, whose import takes longer than some runs: it brings scipy and pandas.
    folder = find_spec("sklearn").submodule_search_locations[0]  # type: ignore[union-attr,index]
    file = Path(folder, "datasets", "data", "digits.csv.gz")
    rows = torch.from_numpy(np.loadtxt(file, delimiter=",", dtype=np.uint8))
    images, labels = rows[:, :-1].reshape(-1, 1, 8, 8), rows[:, -1].long()
    train, test = _split_stratified(labels.numpy(), test=360)
    return Dataset("digits", images[train], labels[train], images[test], labels[test], classes=10, top=16)


def _split_stratified(labels: np.ndarray, test: int) -> tuple[np.ndarray, np.ndarray]:
    """Split as `train_test_split(stratify=labels, random_state=0)`, in that order.

    The function is scikit-learn's.
    """
    rng = np.random.RandomState(0)
    sizes = np.bincount(labels)

    def share_out(have: np.ndarray, total: int) -> np.ndarray:
        """Round shares of `total` down, and up where most is missing, by chance if equal."""
        exact = have / have.sum() * total
        counts = np.floor(exact)
        missing = exact - counts
        for value in np.unique(missing)[::-1]:
            (equal,) = np.nonzero(missing == value)
            left = int(total - counts.sum())
            if left == 0:
                break
            counts[rng.choice(equal, min(len(equal), left), replace=False)] += 1
        return counts.astype(int)

    train_sizes = share_out(sizes, len(labels) - test)
    test_sizes = share_out(sizes - train_sizes, test)
    train_rows, test_rows = [], []
    for label, (a, b) in enumerate(zip(train_sizes, test_sizes)):
        rows = np.flatnonzero(labels == label)[rng.permutation(sizes[label])]
        train_rows.extend(rows[:a])
        test_rows.extend(rows[a : a + b])
    return rng.permutation(train_rows), rng.permutation(test_rows)


def mnist(root: Path, download: bool, title: str = "MNIST") -> Dataset:
    """Load MNIST (LeCun et al. 1998) or Fashion-MNIST (Xiao et al. 2017) by title.

    Returns:
        x uint8 [60000, 1, 28, 28], test_x [10000, 1, 28, 28], 10 classes.
    """
    from torchvision import datasets

    folder = title.replace("-", "")
    source = DataFiles(title, root, _idx_files(folder, "train", "t10k"))
    return _idx(title.lower(), getattr(datasets, folder), source, range(10), download)


def emnist(root: Path, download: bool, split: str) -> Dataset:
    """Load a split of EMNIST (Cohen et al. 2017): digits and letters, [N, 1, 28, 28].

    NIST's files hold each image transposed; here images stand upright. Labels start at 0 in every split.

    Args:
        split: balanced (47 classes, N = 112,800), byclass (62 classes, 697,932), letters (26 classes, 124,800) or
            digits (10 classes, 240,000). Classes are in the order 0-9, A-Z, a-z.
    """
    from torchvision.datasets import EMNIST

    name = f"emnist-{split}"
    source = DataFiles(f"EMNIST {split}", root, _idx_files("EMNIST", f"{name}-train", f"{name}-test"))
    lying = _idx(name, partial(EMNIST, split=split), source, EMNIST_LABELS[split], download)
    x, test_x = (images.transpose(2, 3).contiguous() for images in (lying.x, lying.test_x))
    return replace(lying, x=x, test_x=test_x)


def cifar(root: Path, download: bool, classes: int, coarse: bool = False) -> Dataset:
    """Load CIFAR-10 or CIFAR-100 (Krizhevsky 2009), by the number of its classes.

    torchvision's class keeps the fine labels only, so the coarse ones are read from the same two files, whose md5
    it has checked by then.

    Args:
        coarse: label CIFAR-100 by its 20 superclasses of five fine classes each.

    Returns:
        x uint8 [50000, 3, 32, 32], test_x [10000, 3, 32, 32].
    """
    from torchvision import datasets
    from torchvision.datasets.utils import check_integrity

    cls = getattr(datasets, f"CIFAR{classes}")
    md5 = dict([*cls.train_list, *cls.test_list, (cls.meta["filename"], cls.meta["md5"])])
    source = DataFiles(f"CIFAR-{classes}", root, tuple(f"{cls.base_folder}/{file}" for file in md5))

    def probe(file: Path) -> None:
        if not check_integrity(file, md5[file.name]):
            raise ValueError("its md5 differs from the published one")

    arrays, count = [], 20 if coarse else classes
    files = source.files[0], source.files[len(cls.train_list)]  # of training samples (the first), of test samples
    for part, file in zip(_parts(cls, source, download, probe), files):
        labels = torch.tensor(part.targets)
        if coarse:
            labels = torch.tensor(pickle.loads((root / file).read_bytes(), encoding="latin1")["coarse_labels"])
        source.check_labels(labels, range(count), len(part.data), file)
        arrays += [torch.from_numpy(part.data).permute(0, 3, 1, 2).contiguous(), labels]
    x, y, test_x, test_y = arrays
    return Dataset(f"cifar{classes}{'-coarse' * coarse}", x, y, test_x, test_y, classes=count)


def _parts(cls: Callable, source: DataFiles, download: bool, probe: Callable[[Path], object]):
    """Load (train, test) by torchvision's class, which downloads missing files.

    If files are damaged, `probe`, which raises an exception for a damaged file, finds the one to name.
    """

    def read(fetch: bool) -> tuple:
        return tuple(cls(source.root, train=part, download=fetch) for part in (True, False))

    source.require(download, lambda: read(True))
    try:
        return read(False)
    except Exception as error:  # torchvision raises many kinds, down to AssertionError, for what it cannot read
        for file in source.files:
            try:
                probe(source.root / file)
            except Exception as cause:
                raise source.damage_error(file, cause) from error
        raise source.error(f"files are damaged ({reason(error)})") from error


def _idx_files(folder: str, *parts: str) -> tuple[str, ...]:
    kinds = ("images-idx3", "labels-idx1")
    return tuple(f"{folder}/raw/{part}-{kind}-ubyte" for part in parts for kind in kinds)


def _idx(name: str, cls: Callable, source: DataFiles, valid: range, download: bool) -> Dataset:
    """Load a data set of a class like MNIST, with files of images and of labels."""
    train, test = parts = _parts(cls, source, download, _read_idx)
    for part, images, labels in zip(parts, source.files[::2], source.files[1::2]):
        if part.data.shape[1:] != (28, 28):
            raise source.damage_error(images, f"images of {'x'.join(map(str, part.data.shape[1:]))} pixels, not 28x28")
        source.check_labels(part.targets, valid, len(part.data), labels)
    (x, y), (test_x, test_y) = ((part.data.unsqueeze(1), part.targets - valid.start) for part in (train, test))
    return Dataset(name, x, y, test_x, test_y, classes=len(valid))


def _read_idx(file: Path) -> Tensor:
    from torchvision.datasets.mnist import read_image_file, read_label_file

    return (read_image_file if "images" in file.name else read_label_file)(str(file))


LOADERS = {
    "digits": Loader(digits, bundled=True),
    "mnist": Loader(mnist),
    "fashion-mnist": Loader(partial(mnist, title="Fashion-MNIST")),
    **{f"emnist-{split}": Loader(partial(emnist, split=split)) for split in EMNIST_LABELS},
    "cifar10": Loader(partial(cifar, classes=10)),
    "cifar100": Loader(partial(cifar, classes=100)),
    "cifar100-coarse": Loader(partial(cifar, classes=100, coarse=True)),
}
