"""The kind of a partition: a way of dealing samples out to clients."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.base.plugins import check_takes
from fl.base.settings import check_types
from fl.partition.split import Parts


class Partition(NamedTuple):
    """The samples of each client, and the clients that are truly alike.

    Attributes:
        parts: the samples of each client, as indices into the training set.
        structure: the cluster of each client on each level, int64 [levels, clients], see `together` and `alone`.
    """

    parts: Parts
    structure: Tensor


class Task(NamedTuple):
    """The task of a partition: labels to divide among clients.

    Attributes:
        labels: of the samples, int64 [N]; [N, T] for text.
        owners: the natural owner of each sample, int64 [N]; None for data without owners.
        clients: how many there are.
        minimum: samples that every client must have.
        rng: the only source of randomness.
    """

    labels: Tensor
    owners: Tensor | None
    clients: int
    minimum: int
    rng: np.random.Generator


@dataclass(frozen=True)
class Kind:
    """A way of dealing samples out.

    To add one, add a file to this folder that calls it KIND: the file's name is its name on the command line. A file
    with several has a dictionary from their names to them. One outside is given by its import path, or is an entry
    point of the group `layer_surgery.partitions`.

    Attributes:
        deal: (task, options) -> the partition. It raises FLError if the data cannot be divided like this.
        options: the defaults of what it reads, as a frozen dataclass; None if it reads nothing. The fields become flags
            and settings, so two kinds can have an option of the same name only if they have the same dataclass.
        text: whether it can partition text, which has no class labels.
        about: a few words for --help.
        word: options -> what titles say after its name.
        partial: whether it takes the samples of as many owners as there are clients, so that it is no surprise if
            others are left.
    """

    deal: Callable[[Task, Any], Partition]
    options: Any = None
    text: bool = False
    about: str = ""
    word: Callable[[Any], str] = lambda options: ""
    partial: bool = False

    def __post_init__(self) -> None:
        check_takes("not a partition: deal", self.deal, "task, options")
        if self.options is None:
            return
        frozen = dataclasses.is_dataclass(self.options) and type(self.options).__hash__ is not None
        if not frozen or isinstance(self.options, type):
            raise FLError(
                f"not a partition: options must be a frozen dataclass with its defaults, got {self.options!r}"
            )
        check_types(self.options)

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of its options."""
        return () if self.options is None else tuple(field.name for field in dataclasses.fields(self.options))


def together(clients: int) -> Tensor:
    """Make the structure of clients that are alike: one cluster, int64 [1, clients]."""
    return torch.zeros(1, clients, dtype=torch.int64)


def alone(clients: int) -> Tensor:
    """Make the structure of clients that all differ: one each, int64 [1, clients]."""
    return torch.arange(clients)[None]


def counts(partition: Partition, labels: Tensor, classes: int) -> np.ndarray:
    """Count the samples of each client and class, int64 [clients, classes]."""
    parts = partition.parts
    cells = parts.owners * classes + labels[parts.samples].cpu()
    return cells.bincount(minlength=len(parts) * classes).view(-1, classes).numpy()
