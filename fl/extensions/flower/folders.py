"""Data folders: the data of a node or the server, in one file of tensors.

The file is never unpickled.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fl import data
from fl.base import tensors as files
from fl.base.errors import FLError
from fl.base.files import private
from fl.base.rng import Rng
from fl.data import Dataset
from fl.extensions.flower.messages import form_of
from fl.partition import Split
from fl.settings import Config

FILE = "data.safetensors"
SERVER = "server"
"""The server's folder among those that `deal_out` makes; a node's is named as `node_folder` says."""
_FORMAT = "data-2"


def node_folder(root: Path, client: int) -> Path:
    """Return the folder of a node among those that `deal_out` makes.

    >>> node_folder(Path("data"), 2)
    PosixPath('data/node-2')
    """
    return root / f"node-{client}"


def save_node(folder: Path, dataset: Dataset, split: Split) -> None:
    """Write the samples of a node's split, without the test set of the data set.

    Args:
        split: which samples the node trains on, validates on and tests on, as indices into the training part.
    """
    index = torch.cat(list(split))
    _write(folder, dataset, *dataset.gather(index), [len(part) for part in split])


def save_server(folder: Path, dataset: Dataset) -> None:
    """Write the test set, which is all that the server has."""
    _write(folder, dataset, dataset.test_x, dataset.test_y, [0, 0, len(dataset.test_y)])


def read_node(folder: Path) -> tuple[Dataset, Split]:
    """Return what `save_node` wrote: a data set, and the use of each sample.

    Its test part is its first sample. Raises FLError, which names the file, if it cannot be read.
    """
    x, y, header = _read(folder)
    split = Split(*torch.arange(len(y)).split(header["sizes"]))
    return Dataset(data.GIVEN, x, y, x[:1], y[:1], header["classes"], header["top"]), split


def read_server(folder: Path) -> Dataset:
    """Return what `save_server` wrote: a data set with one sample for training."""
    x, y, header = _read(folder)
    return Dataset(data.GIVEN, x[:1], y[:1], x, y, header["classes"], header["top"])


def deal_out(config: Config, root: Path) -> None:
    """Write the folders of a server and all clients, with data as in a simulation.

    Raises FLError if there is something in the folder.
    """
    if root.exists() and any(root.iterdir()):
        raise FLError(f"{root} exists already: choose another folder for the nodes' data", code="file")
    rng = Rng(config.seed)
    dataset = config.load()
    parts, _ = config.data.deal(dataset, config.clients.number, rng.numpy("partition"))
    dataset, splits = config.data.split(dataset, parts, rng.numpy("hold-out"))
    save_server(root / SERVER, dataset)
    for client, split in enumerate(splits):
        save_node(node_folder(root, client), dataset, split)


def _write(folder: Path, dataset: Dataset, x: Any, y: Tensor, sizes: list[int]) -> None:
    form_of(dataset)  # which refuses data that nodes cannot have
    if not len(y):
        raise FLError(f"{folder} would get no samples: give it some, or leave it out", code="data")
    header = {"sizes": sizes, "classes": dataset.classes, "top": dataset.top}
    with private(folder):
        files.write(folder / FILE, _FORMAT, {"x": x, "y": y}, header)


def _read(folder: Path) -> tuple[Tensor, Tensor, dict]:
    path = folder / FILE
    if not path.exists():
        raise FLError(
            f"{path} is not there: write the data of server and nodes with `layer-surgery deploy --only data`, or a "
            "node's own with fl.extensions.flower.folders.save_node",
            code="file",
        )
    tensors, header = files.read(path, _FORMAT)
    return tensors["x"], tensors["y"], header
