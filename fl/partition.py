"""Who holds which samples."""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl.errors import FLError

_TRIES = 200


class Split(NamedTuple):
    """The samples of one client, as indices into the data set's training part."""

    train: Tensor
    valid: Tensor
    test: Tensor


def iid(labels: Tensor, clients: int, minimum: int, rng: np.random.Generator) -> list[Tensor]:
    """Deal the samples out at random in equal numbers (they differ by one where they must).

    Returns:
        One index tensor a client, disjoint, together all samples.

    >>> [len(part) for part in iid(torch.zeros(10), 3, 1, np.random.default_rng(0))]
    [4, 3, 3]
    """
    if len(labels) // clients < minimum:
        raise FLError(
            f"{len(labels)} samples give {clients} clients fewer than {minimum} each: use fewer clients or a "
            "smaller --min-samples"
        )
    return [torch.from_numpy(np.sort(part)) for part in np.array_split(rng.permutation(len(labels)), clients)]


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


def hold_out(parts: list[Tensor], valid: float, test: float, rng: np.random.Generator) -> list[Split]:
    """Split each client's samples at random into train, validation and test by shares (0 leaves a part empty).

    A part whose share is above 0 gets at least one sample, and so does training.

    >>> split = hold_out([torch.arange(10)], valid=0.1, test=0.2, rng=np.random.default_rng(0))[0]
    >>> [len(part) for part in split]
    [7, 1, 2]
    """
    if not (valid >= 0 and test >= 0 and valid + test < 1):
        raise FLError(f"--local-valid {valid} and --local-test {test} are shares whose sum must stay below 1")
    splits = []
    for client, part in enumerate(parts):
        n = len(part)
        v, t = (max(1, round(share * n)) if share else 0 for share in (valid, test))
        if v + t >= n and n:
            raise FLError(f"client {client} has {n} samples, too few to split off validation and test data")
        order = part[torch.from_numpy(rng.permutation(n))] if v + t else part
        pieces = order.split([n - v - t, v, t])
        splits.append(Split(*(piece.sort().values for piece in pieces)))
    return splits
