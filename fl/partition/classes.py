"""Partitions by classes: shards (a few for a client), clusters (which share some)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch

from fl.base.errors import FLError
from fl.base.settings import Defaults, Integers, Sizes, number, write_value
from fl.partition.kind import Kind, Partition, Task, alone
from fl.partition.split import Parts
from fl.partition.unlabelled import even

_TABLE = {  # Table C.1: classes of each cluster, by the number of classes and of clusters on each level
    (100, (2, 5, 9)): (19, 7, 3),
    (100, (3, 6, 11)): (14, 6, 2),
    (200, (4, 13, 21)): (20, 6, 2),
    (200, (9, 15, 22)): (9, 5, 2),
}


@dataclass(frozen=True)
class ShardsOptions:
    """Shares of the classes."""

    class_share: Annotated[float, number(float, above=0, most=1)] = 0.2
    """shards: share of the classes that each client holds, with equally many samples of each (FedFA: 0.2)"""


@dataclass(frozen=True)
class ClustersOptions:
    """Clusters of clients."""

    clusters: Integers = Defaults((5,))
    """clusters: number of clusters, without this flag no more than clients; several numbers are levels from coarse to
    fine (FeMAM: 5, and levels as 2,5,9)"""
    cluster_classes: Sizes = ()
    """clusters: number of classes of each cluster, one for each level; auto is FeMAM's number where it has one, else an
    equal share"""


def shards(task: Task, options: ShardsOptions) -> Partition:
    """Deal each client a share of the classes, with equal counts per class.

    FedFA's non-IID setting, section 5: 20%. Classes are divided evenly: the numbers of clients that hold them differ by
    one at most. All clients have the same number of samples of each of their classes, one class at least, which is the
    largest possible number; what is left is not used.
    """
    share, clients = options.class_share, task.clients
    if not 0 < share <= 1:
        raise FLError(f"--class-share is a share of the classes above 0 and at most 1, got {share}")
    y = task.labels.cpu().numpy()
    classes = np.unique(y)
    held = deal_classes(len(classes), clients, max(1, round(share * len(classes))), task.rng)
    holders = np.bincount(held.ravel(), minlength=len(classes))
    members = [task.rng.permutation(np.flatnonzero(y == label)) for label in classes]
    count = min(len(m) // h for m, h in zip(members, holders) if h)
    if count == 0 or count * held.shape[1] < task.minimum:
        raise FLError(
            f"{clients} clients with {held.shape[1]} classes each get {count} samples of a class, too few for "
            f"--min-samples {task.minimum}: use fewer clients, a larger --class-share or a smaller --min-samples"
        )
    owners = np.full(len(y), -1)
    for c, samples in enumerate(members):
        takers = np.flatnonzero((held == c).any(1))
        owners[samples[: count * len(takers)]] = np.repeat(takers, count)
    return Partition(Parts.of_owners(owners, clients), alone(clients))


def deal_classes(classes: int, holders: int, per_holder: int, rng: np.random.Generator) -> np.ndarray:
    """Deal distinct classes to every holder, [holders, per_holder].

    Each class is dealt equally often, give or take one.
    """
    dealt = np.zeros(classes, dtype=np.int64)
    rows = []
    for _ in range(holders):
        order = rng.permutation(classes)
        row = order[np.argsort(dealt[order], kind="stable")[:per_holder]]  # those dealt least so far, ties at random
        dealt[row] += 1
        rows.append(row)
    return np.stack(rows)


def clusters(task: Task, options: ClustersOptions) -> Partition:
    """Deal by clusters, which clients form on each level, each with its own classes.

    One level: every cluster has `cluster_classes` of all classes. If there are too few for that, clusters overlap, as
    little as possible. Several levels, from coarse to fine: each has classes of its own, which are divided among its
    clusters without overlap; a client has the classes of its cluster on every level. Finer clusters lie within coarser
    ones. The samples of a class are split evenly over all clients of the clusters that have it.
    """
    y, clients, counts, rng = task.labels.cpu().numpy(), task.clients, tuple(options.clusters), task.rng
    names = np.unique(y)
    if not counts or min(counts) < 1 or list(counts) != sorted(counts) or counts[-1] > clients:
        raise FLError(
            f"--clusters {write_value(counts) or 'none'} for {clients} clients: give numbers that do not decrease from "
            "level to level, and no more clusters than clients"
        )
    classes = _classes_of(len(names), counts, tuple(options.cluster_classes))
    needed = sum(k * c for k, c in zip(counts, classes))
    if max(classes) > len(names):
        raise FLError(f"--cluster-classes {write_value(classes)}: the data has {len(names)} classes, use fewer")
    if len(counts) > 1 and needed > len(names):
        raise FLError(
            f"--clusters {write_value(counts)} with --cluster-classes {write_value(classes)} need {needed} classes on "
            f"disjoint levels, the data has {len(names)}: use fewer"
        )
    structure = nest_clusters(counts, clients)
    pool = rng.permutation(len(names))
    owners = np.full(len(y), -1)
    for level, (k, c) in enumerate(zip(counts, classes)):
        pool, labels = (pool, pool) if len(counts) == 1 else (pool[k * c :], pool[: k * c])
        dealt = labels[deal_classes(len(labels), k, c, rng)]  # [k, c]
        for label in labels:
            holders = np.flatnonzero(np.isin(structure[level], np.flatnonzero((dealt == label).any(1))))
            members = rng.permutation(np.flatnonzero(y == names[label]))
            if len(holders):
                owners[members] = np.repeat(rng.permutation(holders), even(len(members), len(holders)))
    parts = Parts.of_owners(owners, clients)
    if (fewest := int(parts.sizes.min())) < task.minimum:
        raise FLError(
            f"--clusters {write_value(counts)} leave a client with {fewest} samples, fewer than --min-samples "
            f"{task.minimum}: use fewer clients, more --cluster-classes or a smaller --min-samples"
        )
    return Partition(parts, torch.from_numpy(structure))


def nest_clusters(counts: Sequence[int], clients: int) -> np.ndarray:
    """Assign each client a cluster on each level: runs of clients, finer in coarser.

    Returns [levels, clients]. The finest runs have nearly equal lengths; coarser ones are unions of nearly equally many
    of these: of (2, 3) and 5 clients [[0, 0, 0, 0, 1], [0, 0, 1, 1, 2]].
    """
    rows = [np.arange(clients) * counts[-1] // clients]
    for coarse, fine in zip(counts[-2::-1], counts[:0:-1]):
        rows.insert(0, rows[0] * coarse // fine)
    return np.stack(rows)


def _classes_of(total: int, counts: tuple[int, ...], classes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the number of classes of each cluster, one a level.

    If need be it is FeMAM's, or an equal share, rounded up.
    """
    if not classes and (total, counts) in _TABLE:
        return _TABLE[total, counts]
    if not classes and len(counts) == 1:
        return (-(-total // counts[0]),)
    if not classes and sum(counts) <= total:
        return _share_out(total, counts)
    if len(classes) != len(counts) or min(classes) < 1:
        raise FLError(
            f"--clusters {write_value(counts)} of {total} classes need --cluster-classes: one number, 1 or more, for "
            f"each level; got {write_value(classes) or 'none'}"
        )
    return classes


def _share_out(total: int, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Choose how many classes clusters have, where the paper has no numbers.

    Coarse levels have more. Of L levels, the l-th gets a share in proportion to 2L - l, which is close to the averages
    of Table C.1 (40, 37 and 23% on three levels). What is left over goes to the levels in turn, coarse ones first: one
    more class for each of their clusters.

    >>> _share_out(62, (3, 6, 11)), _share_out(10, (2, 3)), _share_out(100, (3, 6, 11))
    ((9, 4, 1), (3, 1), (14, 6, 2))
    """
    weights = [2 * len(counts) - level for level in range(1, len(counts) + 1)]
    classes = [max(1, total * weight // (sum(weights) * k)) for weight, k in zip(weights, counts)]
    while sum(c * k for c, k in zip(classes, counts)) > total:  # a cluster's one class can be more than its share
        level = max(range(len(counts)), key=lambda at: (classes[at], at))
        classes[level] -= 1
    left = total - sum(c * k for c, k in zip(classes, counts))
    while left >= counts[0]:
        for level, k in enumerate(counts):
            if k <= left and (level == 0 or classes[level] < classes[level - 1]):
                classes[level], left = classes[level] + 1, left - k
    return tuple(classes)


KIND = {
    "clusters": Kind(
        clusters,
        ClustersOptions(),
        about="groups with classes of their own",
        word=lambda options: write_value(options.clusters),
    ),
    "shards": Kind(
        shards,
        ShardsOptions(),
        about="a few classes each",
        word=lambda options: f"{options.class_share:g}",
    ),
}
