"""A partition by name."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.partition.clusters import clusters as by_clusters
from fl.partition.dirichlet import dirichlet
from fl.partition.iid import contiguous, iid
from fl.partition.natural import natural
from fl.partition.shards import shards
from fl.partition.split import Parts

KINDS = ("iid", "dirichlet", "shards", "clusters", "contiguous", "natural")
_TEXT = ("iid", "contiguous", "natural")


class Partition(NamedTuple):
    """Attributes:
    parts: the samples of each client, indices into the training set.
    structure: the truth about who is like whom: the cluster of each client on each level, int64 [levels, clients].
        All are in one cluster where there is no skew, and each is its own where every client is different.
    """

    parts: Parts
    structure: Tensor


def deal(
    labels: Tensor,
    kind: str,
    clients: int,
    rng: np.random.Generator,
    minimum: int = 10,
    alpha: float = 0.5,
    unequal: bool = False,
    class_share: float = 0.2,
    clusters: Sequence[int] = (5,),
    cluster_classes: Sequence[int] = (),
    owners: Tensor | None = None,
) -> Partition:
    """Deal out samples to clients; see the function of that name for what it does with its options.

    Args:
        labels: [N], int64; [N, T] of text, which only iid, contiguous and natural can deal out.
        kind: iid, dirichlet, shards, clusters, contiguous or natural.
        rng: the partition is a function of it and the other arguments.

    Raises:
        FLError: for an unknown kind, and for data that cannot be dealt out like this.
    """
    if labels.ndim > 1:
        check_text_kind(kind)
    alone, together = torch.arange(clients)[None], torch.zeros(1, clients, dtype=torch.int64)
    if kind == "iid":
        return Partition(iid(labels, clients, minimum, rng, unequal), together)
    if kind == "dirichlet":
        return Partition(dirichlet(labels, clients, alpha, minimum, rng), alone)
    if kind == "shards":
        return Partition(shards(labels, clients, class_share, minimum, rng), alone)
    if kind == "clusters":
        return Partition(*by_clusters(labels, clients, clusters, cluster_classes, minimum, rng))
    if kind == "contiguous":
        return Partition(contiguous(labels, clients, minimum), alone)
    if kind == "natural":
        return Partition(natural(owners, clients, minimum, rng), alone)
    raise FLError(f"unknown partition {kind!r}: there are {', '.join(KINDS)}")


def check_text_kind(kind: str) -> None:
    """Raise FLError for a partition that goes by class labels, which text does not have."""
    if kind not in _TEXT:
        raise FLError(
            f"--partition {kind} goes by class labels, and text has none: choose {', '.join(_TEXT)}, and a text --model"
        )
