"""Label skew by a Dirichlet distribution: clients differ in classes and in size."""

import heapq
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from fl.base.errors import FLError
from fl.base.settings import Above0
from fl.partition.kind import Kind, Partition, Task, alone
from fl.partition.split import Parts

_TRIES = 200

_log = logging.getLogger("fl")


@dataclass(frozen=True)
class DirichletOptions:
    """Shares from a Dirichlet distribution."""

    alpha: Above0 = 0.5
    """dirichlet, dirichlet_mixture, dirichlet_sizes: concentration of the shares; smaller is more heterogeneous (FedMR:
    0.1, 0.5 and 1)"""


def dirichlet(task: Task, options: DirichletOptions) -> Partition:
    """Partition each class by Dirichlet shares of the clients, with a balance rule.

    Source: Yurochkin et al. 2019. Each class is divided into shares p ~ Dir(alpha) of the clients. Clients that already
    have N / clients samples or more get none; the other shares are renormalised, and the class is cut at their
    cumulative sum. FedMR's released code, PFLlib and NIID-Bench do the same. Sizes differ widely. `dirichlet_mixture`
    samples a mixture of classes for each client, as in Hsu et al. (2019), which FedMR's paper cites. At alpha 0.1 the
    two partitions differ strongly.
    """
    y = task.labels.cpu().numpy()
    parts = draw_until(task, "dirichlet", options.alpha, lambda: _draw(y, task.clients, options.alpha, task.rng))
    return Partition(parts, alone(task.clients))


def check_alpha(alpha: float) -> None:
    """Raise FLError for what is no concentration."""
    if not 0 < alpha < math.inf:
        raise FLError(f"--alpha is a concentration above 0, got {alpha}")


def draw_until(task: Task, name: str, alpha: float, draw: Callable[[], tuple[np.ndarray, np.ndarray]]) -> Parts:
    """Draw until every client has the minimum.

    With a small alpha and many clients, none of 200 draws may do so. Then single samples of the last draw move from the
    largest clients to clients that have too few, and a warning says how many.

    Args:
        name: of the partition.
        draw: () -> the client of each sample [N], and the samples of each client [clients].

    Raises:
        FLError: for what is no concentration, and for fewer samples than all clients need.
    """
    check_alpha(alpha)
    n, clients, minimum = len(task.labels), task.clients, task.minimum
    if n < clients * minimum:
        raise FLError(
            f"{n} samples cannot give {clients} clients {minimum} each: use fewer clients or a smaller --min-samples"
        )
    moved = 0
    for _ in range(_TRIES):
        owners, sizes = draw()
        if sizes.min() >= minimum:
            break
    else:
        moved = _fill(owners, sizes, minimum, task.rng)
        _log.warning(
            f"warning: {name}{alpha:g} gives {clients:,} clients {minimum} samples each in none of {_TRIES} draws: "
            f"{moved:,} of {n:,} samples were moved to those that had fewer, from the largest"
        )
    return replace(Parts.of_owners(owners, clients), moved=moved)


def _fill(owners: np.ndarray, sizes: np.ndarray, minimum: int, rng: np.random.Generator) -> int:
    """Give every client `minimum` samples, one at a time, from the largest client.

    Changes the client of each sample [N], and returns how many samples moved.
    """
    needy = np.repeat(np.arange(len(sizes)), np.maximum(minimum - sizes, 0))
    largest = [(-size, client) for client, size in enumerate(sizes.tolist()) if size > minimum]
    heapq.heapify(largest)
    left: dict[int, list[int]] = {}
    for client in needy:
        size, giver = largest[0]
        if giver not in left:
            left[giver] = rng.permutation(np.flatnonzero(owners == giver)).tolist()
        owners[left[giver].pop()] = client
        heapq.heapreplace(largest, (size + 1, giver))
    return len(needy)


def _draw(y: np.ndarray, clients: int, alpha: float, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Draw the client of each sample [N], and count each client's samples."""
    owners, sizes = np.empty(len(y), dtype=np.int64), np.zeros(clients, dtype=np.int64)
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        open_ = sizes < len(y) / clients
        share = rng.dirichlet(np.full(clients, alpha)) * open_
        # A tiny alpha can put all of the mass on clients that are full; the others then get equal shares.
        share = share / share.sum() if share.sum() > 0 else open_ / open_.sum()
        cuts = (np.cumsum(share)[:-1] * len(members)).astype(np.int64)
        pieces = np.diff(cuts, prepend=0, append=len(members))
        owners[members] = np.repeat(np.arange(clients), pieces)
        sizes += pieces
    return owners, sizes


KIND = Kind(
    dirichlet,
    DirichletOptions(),
    about="a share of each class",
    word=lambda options: f"{options.alpha:g}",
)
