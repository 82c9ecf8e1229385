"""No skew: every client has a random sample of the whole."""

import numpy as np
import torch
from torch import Tensor

from fl.errors import FLError


def iid(labels: Tensor, clients: int, minimum: int, rng: np.random.Generator, unequal: bool = False) -> list[Tensor]:
    """Deal the samples out at random, in equal numbers (they differ by one where they must) or unequal ones.

    Args:
        labels: [N]; only their number matters.
        minimum: samples that every client must have.
        unequal: sizes are drawn uniformly between n and 2n, where n is such that all samples are used (FedFA's IID
            setting, section 5).

    Returns:
        One index tensor a client, disjoint, together all samples.

    >>> [len(part) for part in iid(torch.zeros(10), 3, 1, np.random.default_rng(0))]
    [4, 3, 3]
    >>> sizes = [len(part) for part in iid(torch.zeros(1000), 9, 1, np.random.default_rng(0), unequal=True)]
    >>> sum(sizes), max(sizes) <= 2 * min(sizes)
    (1000, True)
    """
    n = len(labels)
    equal = [n // clients + (k < n % clients) for k in range(clients)]
    sizes = _unequal(n, clients, rng) if unequal and n >= clients else equal
    if min(sizes) < minimum:
        raise FLError(
            f"{n} samples give {clients} clients fewer than {minimum} each: use fewer clients or smaller --min-samples"
        )
    parts = np.split(rng.permutation(n), np.cumsum(sizes)[:-1])
    return [torch.from_numpy(np.sort(part)) for part in parts]


def _unequal(n: int, clients: int, rng: np.random.Generator) -> list[int]:
    """Sizes in proportion to uniform draws between 1 and 2, of which none is more than twice another."""
    shares = rng.uniform(1, 2, clients)
    ends = (np.cumsum(shares) / shares.sum() * n).round().astype(np.int64)
    sizes = np.diff(ends, prepend=0)  # rounded, which is mended:
    while sizes.max() > 2 * sizes.min():
        sizes[sizes.argmax()] -= 1
        sizes[sizes.argmin()] += 1
    return sizes.tolist()
