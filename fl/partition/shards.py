"""Each client holds a share of the classes, and equally many samples of each of these."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from torch import Tensor

from fl.base.errors import FLError
from fl.base.settings import number
from fl.partition.kind import Kind, Partition, alone
from fl.partition.split import Parts


@dataclass(frozen=True)
class ShardsOptions:
    """Shares of the classes."""

    class_share: Annotated[float, number(float, above=0, most=1)] = 0.2
    """shards: share of the classes that a client has, with equally many samples of each (FedFA)"""


def shards(labels: Tensor, clients: int, share: float, minimum: int, rng: np.random.Generator) -> Parts:
    """Each client has a share of the classes, with equal counts per class (FedFA's non-IID setting, section 5: 20%).

    Classes are dealt out evenly: the numbers of clients that hold them differ by one at most. All clients have the
    same number of samples of each of their classes, which is the largest possible one; what is left is not used.

    Args:
        labels: [N], int64.
        share: of the classes, above 0 and at most 1; a client has one class at least.
        minimum: samples that every client must have.

    Returns:
        The samples of each client, disjoint and equally many.

    Raises:
        FLError: if there are not enough samples for every client.

    >>> import torch
    >>> y = torch.arange(100) % 10
    >>> parts = shards(y, 10, 0.2, 1, np.random.default_rng(0))
    >>> {len(y[part].unique()) for part in parts}, {len(part) for part in parts}
    ({2}, {10})
    """
    if not 0 < share <= 1:
        raise FLError(f"--class-share is a share of the classes above 0 and at most 1, got {share}")
    y = labels.cpu().numpy()
    classes = np.unique(y)
    if not len(classes):
        raise FLError("there are no samples to deal out")
    held = deal_classes(len(classes), clients, max(1, round(share * len(classes))), rng)
    holders = np.bincount(held.ravel(), minlength=len(classes))
    members = [rng.permutation(np.flatnonzero(y == label)) for label in classes]
    count = min(len(m) // h for m, h in zip(members, holders) if h)
    if count == 0 or count * held.shape[1] < minimum:
        raise FLError(
            f"{clients} clients with {held.shape[1]} classes each get {count} samples of a class, too few for "
            f"--min-samples {minimum}: use fewer clients, a larger --class-share or a smaller --min-samples"
        )
    owners = np.full(len(y), -1)
    for c, samples in enumerate(members):
        mine = np.flatnonzero((held == c).any(1))
        owners[samples[: count * len(mine)]] = np.repeat(mine, count)
    return Parts.owned(owners, clients)


def deal_classes(classes: int, holders: int, each: int, rng: np.random.Generator) -> np.ndarray:
    """Distinct classes for every holder, [holders, each]; each class is dealt equally often, give or take one.

    >>> deal_classes(4, 2, 2, np.random.default_rng(0)).ravel().tolist()
    [2, 0, 3, 1]
    """
    dealt = np.zeros(classes, dtype=np.int64)
    rows = []
    for _ in range(holders):
        order = rng.permutation(classes)
        row = order[np.argsort(dealt[order], kind="stable")[:each]]  # those dealt least so far, ties at random
        dealt[row] += 1
        rows.append(row)
    return np.stack(rows)


KIND = Kind(
    lambda task, options: Partition(
        shards(task.labels, task.clients, options.class_share, task.minimum, task.rng), alone(task.clients)
    ),
    ShardsOptions(),
    about="each client has a few classes",
    word=lambda options: f"{options.class_share:g}",
)
