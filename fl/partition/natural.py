"""Clients are the owners that the data names: writers, speakers."""

import numpy as np
from torch import Tensor

from fl.base.errors import FLError
from fl.partition.kind import Kind, Partition, alone
from fl.partition.split import Parts


def natural(owners: Tensor | None, clients: int, minimum: int, rng: np.random.Generator) -> Parts:
    """One client for each of `clients` owners, drawn at random from those with enough samples.

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


KIND = Kind(
    lambda task, _: Partition(natural(task.owners, task.clients, task.minimum, task.rng), alone(task.clients)),
    text=True,
    about="the data's own owners, such as writers",
    partial=True,
)
