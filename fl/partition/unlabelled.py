"""Partitions that do not look at labels, and take text: iid, contiguous, natural."""

from dataclasses import dataclass

import numpy as np

from fl.base.errors import FLError
from fl.partition.kind import Kind, Partition, Task, alone, together
from fl.partition.split import Parts


@dataclass(frozen=True)
class IIDOptions:
    """Random samples of the whole."""

    unequal: bool = False
    """iid: draw sizes between n and 2n instead of equal ones (FedFA's IID setting)"""


def iid(task: Task, options: IIDOptions) -> Partition:
    """Deal the samples at random, in equal (give or take one) or unequal numbers.

    Unequal sizes are uniform between n and 2n, with n such that all samples are used (FedFA's IID setting, section 5).
    """
    n = len(task.labels)
    sizes = _unequal(n, task.clients, task.rng) if options.unequal else even(n, task.clients)
    check_sizes(sizes, task.minimum)
    owners = np.empty(n, dtype=np.int64)
    owners[task.rng.permutation(n)] = np.repeat(np.arange(task.clients), sizes)
    return Partition(Parts.of_owners(owners, task.clients), together(task.clients))


def contiguous(task: Task, options: None = None) -> Partition:
    """Cut the samples, in order, into equal pieces: each has the next part of a text."""
    sizes = even(len(task.labels), task.clients)
    check_sizes(sizes, task.minimum)
    return Partition(Parts.of_owners(np.repeat(np.arange(task.clients), sizes), task.clients), alone(task.clients))


def natural(task: Task, options: None = None) -> Partition:
    """Make a client of each of `clients` owners, in the order of their numbers.

    They are chosen at random from the owners with enough samples.
    """
    if task.owners is None:
        raise FLError(
            "--partition natural needs data whose samples have owners, such as femnist, pydoc or shakespeare: choose "
            "another",
            code="unsupported",
        )
    _, places, sizes = np.unique(task.owners.cpu().numpy(), return_inverse=True, return_counts=True)
    able = np.flatnonzero(sizes >= max(1, task.minimum))
    if len(able) < task.clients:
        raise FLError(
            f"{len(able)} of {len(sizes)} owners have {task.minimum} samples or more, fewer than "
            f"--clients {task.clients}: "
            + (f"give --clients {len(able)}" if len(able) else "use a smaller --min-samples")
            + (" or a smaller --min-samples" if 0 < len(able) < len(sizes) else "")
        )
    client = np.full(len(sizes), -1)
    client[np.sort(task.rng.choice(able, task.clients, replace=False))] = np.arange(task.clients)
    return Partition(Parts.of_owners(client[places], task.clients), alone(task.clients))


def check_sizes(sizes: np.ndarray, minimum: int) -> None:
    """Raise FLError if a client would have fewer samples than the minimum."""
    if sizes.min() < minimum:
        raise FLError(
            f"{sizes.sum()} samples give {len(sizes)} clients fewer than {minimum} each: use fewer clients or a "
            "smaller --min-samples"
        )


def even(n: int, clients: int) -> np.ndarray:
    """Divide n into equal shares [clients], the first ones larger by one if need be."""
    return n // clients + (np.arange(clients) < n % clients)


def _unequal(n: int, clients: int, rng: np.random.Generator) -> np.ndarray:
    """Draw sizes that are random in proportion: none is more than twice another."""
    shares = rng.uniform(1, 2, clients)
    ends = (np.cumsum(shares) / shares.sum() * n).round().astype(np.int64)
    sizes = np.diff(ends, prepend=0)  # after rounding, a size may be more than twice another; the loop repairs that
    while (largest := sizes.max()) > 2 * (smallest := sizes.min()):
        high, low = np.flatnonzero(sizes == largest), np.flatnonzero(sizes == smallest)
        pairs = min(len(high), len(low))
        sizes[high[:pairs]] -= 1
        sizes[low[:pairs]] += 1
    return sizes


KIND = {
    "contiguous": Kind(contiguous, text=True, about="pieces in the order of the data"),
    "iid": Kind(
        iid,
        IIDOptions(),
        text=True,
        about="random samples",
        word=lambda options: "-unequal" if options.unequal else "",
    ),
    "natural": Kind(natural, text=True, about="the data's owners, such as writers", partial=True),
}
