"""FEMNIST in LEAF's JSON form: handwritten characters with their writers.

Source: Caldas et al. 2018.

Every file maps writers to samples: `{"users": [name, ...], "num_samples": [n, ...], "user_data": {name: {"x": [784
floats each], "y": [int, ...]}}}`. Parsing is fast enough (about 10,000 samples a second) to need no cache.
"""

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl.data.dataset import Dataset
from fl.data.loader import DataFiles, Loader

CLASSES = 62  # 0-9, A-Z, a-z
Samples = tuple[np.ndarray, np.ndarray]  # of one writer: uint8 [n, 784], int64 [n]


def load(root: Path, download: bool) -> Dataset:
    """Load LEAF's FEMNIST with the writers as natural owners.

    Source: github.com/TalwalkarLab/leaf. Its data/femnist/preprocess.sh writes data/train/*.json and
    data/test/*.json; put them into root/femnist/train and root/femnist/test. How many writers and samples there are
    depends on the options of that script. Pixels keep LEAF's polarity, dark ink on a white background (1.0, here 255):
    the opposite of MNIST's and EMNIST's.

    Returns:
        x uint8 [N, 1, 28, 28], round(255 * LEAF's floats), in the order of writers; 62 classes (0-9, A-Z, a-z);
        owners number the writers of both parts together, sorted by name; owner_names are these.
    """
    del download
    origin = (
        "There is no download: clone github.com/TalwalkarLab/leaf, run its data/femnist/preprocess.sh and copy its "
        f"data/femnist/data/train and data/femnist/data/test into {root / 'femnist'}"
    )
    source = DataFiles("FEMNIST", root, ("femnist/train/*.json", "femnist/test/*.json"), origin)
    source.require()
    train, test = (_read_part(source, root / "femnist" / part) for part in ("train", "test"))
    numbers = {writer: i for i, writer in enumerate(sorted({*train, *test}))}
    x, y, owners = _stack(train, numbers)
    test_x, test_y, test_owners = _stack(test, numbers)
    return Dataset(
        "femnist", x, y, test_x, test_y, CLASSES, owners=owners, test_owners=test_owners, owner_names=tuple(numbers)
    )


def _read_part(source: DataFiles, folder: Path) -> dict[str, Samples]:
    """Read the samples of every writer from the files of a folder."""
    writers: dict[str, Samples] = {}
    for file in sorted(folder.glob("*.json")):
        try:
            samples = _read_file(file)
            if repeated := writers.keys() & samples.keys():
                raise ValueError(f"writer {min(repeated)} is in another file too")
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError, OSError) as error:
            raise source.damage_error(file, error) from error
        writers |= samples
    if not any(len(y) for _, y in writers.values()):
        raise source.damage_error(folder, "no samples")
    return writers


def _read_file(file: Path) -> dict[str, Samples]:
    document = json.loads(file.read_bytes())
    users, counts, user_data = (document[key] for key in ("users", "num_samples", "user_data"))
    if sorted(users) != sorted(user_data) or len(users) != len(counts):
        raise ValueError("users, num_samples and user_data disagree")
    return {
        user: _samples(user, count, user_data[user]["x"], user_data[user]["y"]) for user, count in zip(users, counts)
    }


def _samples(writer: str, count: int, x: list, y: list) -> Samples:
    if not len(x) == len(y) == count:
        raise ValueError(f"writer {writer}: {len(x)} images and {len(y)} labels where num_samples is {count}")
    if not all(type(label) is int and 0 <= label < CLASSES for label in y):
        raise ValueError(f"writer {writer}: a label is not an integer from 0 to {CLASSES - 1}")
    if not all(len(image) == 784 for image in x):
        raise ValueError(f"writer {writer}: an image does not have 784 pixels")
    pixels = np.array(x, dtype=np.float64).reshape(count, 784)
    if not np.all((pixels >= 0) & (pixels <= 1)):  # false for NaN too
        raise ValueError(f"writer {writer}: a pixel is not in [0, 1]")
    return np.rint(pixels * 255).astype(np.uint8), np.array(y, dtype=np.int64)


def _stack(writers: dict[str, Samples], numbers: dict[str, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack images uint8 [N, 1, 28, 28], labels [N] and owners [N], sorted by owner."""
    order = sorted(writers)
    x = np.concatenate([writers[writer][0] for writer in order]).reshape(-1, 1, 28, 28)
    y = np.concatenate([writers[writer][1] for writer in order])
    owners = np.repeat([numbers[writer] for writer in order], [len(writers[writer][1]) for writer in order])
    return torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(owners)


LOADERS = {"femnist": Loader(load)}
