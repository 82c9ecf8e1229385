"""The data's own owners: writers, speakers."""

import numpy as np
import torch
from torch import Tensor

from fl.errors import FLError


def natural(owners: Tensor | None, clients: int, minimum: int, rng: np.random.Generator) -> list[Tensor]:
    """One client for each of `clients` owners, drawn at random from those with enough samples.

    Args:
        owners: the owner of each training sample, int64 [N]; None for data that have none.
        minimum: samples that an owner must have.

    Returns:
        One index tensor a client, disjoint, in the order of the owners' numbers.

    Raises:
        FLError: if the data have no owners, or not as many.

    >>> natural(torch.tensor([0, 1, 0, 2, 2]), 2, 2, np.random.default_rng(0))
    [tensor([0, 2]), tensor([3, 4])]
    """
    if owners is None:
        raise FLError("--partition natural needs data whose samples have owners, such as femnist: choose another")
    sizes = np.bincount(owners.cpu().numpy())
    able = np.flatnonzero(sizes >= max(1, minimum))
    if len(able) < clients:
        raise FLError(
            f"{len(able)} of {np.count_nonzero(sizes)} owners have {minimum} samples or more, fewer than --clients "
            f"{clients}: use fewer clients or a smaller --min-samples"
        )
    chosen = np.sort(rng.choice(able, clients, replace=False))
    parts = torch.from_numpy(np.argsort(owners.cpu().numpy(), kind="stable")).split(sizes.tolist())
    return [parts[owner] for owner in chosen]
