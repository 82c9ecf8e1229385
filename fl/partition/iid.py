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
    if n // clients < minimum:
        raise FLError(
            f"{n} samples give {clients} clients fewer than {minimum} each: use fewer clients or smaller --min-samples"
        )
    order = rng.permutation(n)
    if unequal:
        ends = np.cumsum(rng.uniform(1, 2, clients))
        parts = np.split(order, (ends[:-1] / ends[-1] * n).round().astype(np.int64))
    else:
        parts = np.array_split(order, clients)
    return [torch.from_numpy(np.sort(part)) for part in parts]
