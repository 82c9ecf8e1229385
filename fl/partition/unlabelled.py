"""Partitions that do not look at labels, and so can deal out text as well: iid, contiguous and natural."""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fl.base.errors import FLError
from fl.partition.kind import Kind, Partition, alone, together
from fl.partition.split import Parts


@dataclass(frozen=True)
class IIDOptions:
    """Random samples of the whole."""

    unequal: bool = False
    """iid: draw sizes between n and 2n instead of equal ones (FedFA's IID setting)"""


def iid(labels: Tensor, clients: int, minimum: int, rng: np.random.Generator, unequal: bool = False) -> Parts:
    """Deal the samples out at random, in equal numbers (give or take one) or in unequal ones.

    Args:
        labels: [N]; only their number matters.
        minimum: samples that every client must have.
        unequal: draw sizes uniformly between n and 2n, with n such that all samples are used (FedFA's IID setting,
            section 5).

    Returns:
        The samples of each client, disjoint, together all.

    >>> import torch
    >>> iid(torch.zeros(10), 3, 1, np.random.default_rng(0)).sizes
    tensor([4, 3, 3])
    >>> sizes = iid(torch.zeros(1000), 9, 1, np.random.default_rng(0), unequal=True).sizes
    >>> int(sizes.sum()), bool(sizes.max() <= 2 * sizes.min())
    (1000, True)
    """
    n = len(labels)
    sizes = _unequal(n, clients, rng) if unequal and n >= clients else even(n, clients)
    check_sizes(sizes, minimum)
    owners = np.empty(n, dtype=np.int64)
    owners[rng.permutation(n)] = np.repeat(np.arange(clients), sizes)
    return Parts.owned(owners, clients)


def check_sizes(sizes: np.ndarray, minimum: int) -> None:
    """Raise FLError if a client would have fewer samples than the minimum."""
    if sizes.min() < minimum:
        raise FLError(
            f"{sizes.sum()} samples give {len(sizes)} clients fewer than {minimum} each: use fewer clients or a "
            "smaller --min-samples"
        )


def even(n: int, clients: int) -> np.ndarray:
    """Divide n into equal shares [clients]; if it cannot be divided, the first shares are one larger.

    >>> even(10, 4)
    array([3, 3, 2, 2])
    """
    return n // clients + (np.arange(clients) < n % clients)


def _unequal(n: int, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Draw sizes in proportion to uniform draws between 1 and 2, so that none is more than twice another."""
    shares = rng.uniform(1, 2, clients)
    ends = (np.cumsum(shares) / shares.sum() * n).round().astype(np.int64)
    sizes = np.diff(ends, prepend=0)  # after rounding, a size may be more than twice another; the loop repairs that
    while (largest := sizes.max()) > 2 * (smallest := sizes.min()):
        high, low = np.flatnonzero(sizes == largest), np.flatnonzero(sizes == smallest)
        pairs = min(len(high), len(low))
        sizes[high[:pairs]] -= 1
        sizes[low[:pairs]] += 1
    return sizes


def contiguous(labels: Tensor, clients: int, minimum: int) -> Parts:
    """Cut the samples, in their order, into pieces of equal size: each client has the next part of a text.

    >>> import torch
    >>> [part.tolist() for part in contiguous(torch.zeros(7), 3, 1)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    sizes = even(len(labels), clients)
    check_sizes(sizes, minimum)
    return Parts.owned(np.repeat(np.arange(clients), sizes), clients)


def natural(owners: Tensor | None, clients: int, minimum: int, rng: np.random.Generator) -> Parts:
    """Make a client of each of `clients` owners, drawn at random from those with enough samples.

    Args:
        owners: the owner of each training sample, int64 [N]; None for data without owners.
        minimum: samples that an owner must have.

    Returns:
        The samples of each client, disjoint, in the order of the owners' numbers.

    Raises:
        FLError: if the data has no owners, or too few.

    >>> import torch
    >>> list(natural(torch.tensor([0, 1, 0, 2, 2]), 2, 2, np.random.default_rng(0)))
    [tensor([0, 2]), tensor([3, 4])]
    """
    if owners is None:
        raise FLError(
            "--partition natural needs data whose samples have owners, such as femnist, pydoc or shakespeare: choose "
            "another"
        )
    names = owners.cpu().numpy()
    sizes = np.bincount(names)
    able = np.flatnonzero(sizes >= max(1, minimum))
    if len(able) < clients:
        raise FLError(
            f"{len(able)} of {np.count_nonzero(sizes)} owners have {minimum} samples or more, fewer than --clients "
            f"{clients}: use fewer clients or a smaller --min-samples"
        )
    chosen = np.sort(rng.choice(able, clients, replace=False))
    client = np.full(len(sizes), -1)
    client[chosen] = np.arange(clients)
    return Parts.owned(client[names], clients)


KIND = {
    "contiguous": Kind(
        lambda task, _: Partition(contiguous(task.labels, task.clients, task.minimum), alone(task.clients)),
        text=True,
        about="pieces of the data set in its order",
    ),
    "iid": Kind(
        lambda task, options: Partition(
            iid(task.labels, task.clients, task.minimum, task.rng, options.unequal), together(task.clients)
        ),
        IIDOptions(),
        text=True,
        about="random samples of the whole",
        word=lambda options: "-unequal" if options.unequal else "",
    ),
    "natural": Kind(
        lambda task, _: Partition(natural(task.owners, task.clients, task.minimum, task.rng), alone(task.clients)),
        text=True,
        about="the data's own owners, such as writers",
        partial=True,
    ),
}
