"""Label skew by a Dirichlet distribution: every client has a mixture of classes of its own."""

import math

import numpy as np
import torch
from torch import Tensor

from fl.errors import FLError

_TRIES = 200


def dirichlet(labels: Tensor, clients: int, alpha: float, minimum: int, rng: np.random.Generator) -> list[Tensor]:
    """Label skew by a Dirichlet distribution (Hsu et al. 2019), with FedMR's balance rule.

    For each class, shares p ~ Dir(alpha) over the clients; clients that already hold N / clients samples or more
    get none, the rest is renormalised and the class is cut by the cumulative sum. The whole draw is repeated
    until every client has `minimum` samples.

    Args:
        labels: [N], int64.
        alpha: concentration; smaller is more heterogeneous.
        minimum: samples that every client must have.

    Returns:
        One index tensor a client, disjoint, together all samples.

    Raises:
        FLError: if no draw out of 200 gives every client enough.
    """
    if not 0 < alpha < math.inf:
        raise FLError(f"--alpha is a concentration above 0, got {alpha}")
    y = labels.cpu().numpy()
    if len(y) < clients * minimum:
        raise FLError(
            f"{len(y)} samples cannot give {clients} clients {minimum} each: use fewer clients or a smaller "
            "--min-samples"
        )
    fewest = 0
    for _ in range(_TRIES):
        parts = _draw(y, clients, alpha, rng)
        fewest = min(map(len, parts), default=0)
        if fewest >= minimum:
            return [torch.from_numpy(np.sort(part)) for part in parts]
    raise FLError(
        f"alpha={alpha:g} leaves a client with {fewest} of {minimum} samples in each of {_TRIES} draws over {clients} "
        "clients: use a larger --alpha, fewer clients or a smaller --min-samples"
    )


def _draw(y: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> list[np.ndarray]:
    parts: list[list[np.ndarray]] = [[] for _ in range(clients)]
    sizes = np.zeros(clients, dtype=np.int64)
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        open_ = sizes < len(y) / clients
        share = rng.dirichlet(np.full(clients, alpha)) * open_
        # A tiny alpha can put all of the mass on clients that are full: then the open ones share alike.
        share = share / share.sum() if share.sum() > 0 else open_ / open_.sum()
        cuts = (np.cumsum(share)[:-1] * len(members)).astype(np.int64)
        for client, piece in enumerate(np.split(members, cuts)):
            parts[client].append(piece)
            sizes[client] += len(piece)
    return [np.concatenate(part) for part in parts]
