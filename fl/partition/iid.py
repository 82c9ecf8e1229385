"""Every client has a random sample of the whole, or a piece of it."""

import numpy as np
from torch import Tensor

from fl.base.errors import FLError
from fl.partition.split import Parts


def iid(labels: Tensor, clients: int, minimum: int, rng: np.random.Generator, unequal: bool = False) -> Parts:
    """Deal the samples out at random, in equal numbers (they differ by one where they must) or unequal ones.

    Args:
        labels: [N]; only their number matters.
        minimum: samples that every client must have.
        unequal: sizes are drawn uniformly between n and 2n, where n is such that all samples are used (FedFA's IID
            setting, section 5).

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
    _check(sizes, minimum)
    owners = np.empty(n, dtype=np.int64)
    owners[rng.permutation(n)] = np.repeat(np.arange(clients), sizes)
    return Parts.owned(owners, clients)


def contiguous(labels: Tensor, clients: int, minimum: int) -> Parts:
    """Cut the samples, in their order, into pieces of equal size: of a text each client has the next part of it.

    >>> import torch
    >>> [part.tolist() for part in contiguous(torch.zeros(7), 3, 1)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    sizes = even(len(labels), clients)
    _check(sizes, minimum)
    return Parts.owned(np.repeat(np.arange(clients), sizes), clients)


def _check(sizes: np.ndarray, minimum: int) -> None:
    if sizes.min() < minimum:
        raise FLError(
            f"{sizes.sum()} samples give {len(sizes)} clients fewer than {minimum} each: use fewer clients or smaller "
            "--min-samples"
        )


def even(n: int, clients: int) -> np.ndarray:
    """n in equal shares, the first of which are one larger where they must [clients].

    >>> even(10, 4)
    array([3, 3, 2, 2])
    """
    return n // clients + (np.arange(clients) < n % clients)


def _unequal(n: int, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Sizes in proportion to uniform draws between 1 and 2, of which none is more than twice another."""
    shares = rng.uniform(1, 2, clients)
    ends = (np.cumsum(shares) / shares.sum() * n).round().astype(np.int64)
    sizes = np.diff(ends, prepend=0)  # rounded, which is mended:
    while (largest := sizes.max()) > 2 * (smallest := sizes.min()):
        high, low = np.flatnonzero(sizes == largest), np.flatnonzero(sizes == smallest)
        pairs = min(len(high), len(low))
        sizes[high[:pairs]] -= 1
        sizes[low[:pairs]] += 1
    return sizes
