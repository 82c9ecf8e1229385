"""Splits: the samples that each client trains, validates and tests on, as tensors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl.base.errors import FLError


class Split(NamedTuple):
    """The samples of one client, as indices into the data set's training part."""

    train: Tensor
    valid: Tensor
    test: Tensor


@dataclass(frozen=True, eq=False)
class Parts(Sequence[Tensor]):
    """An index tensor for each client, all in one tensor; `parts[k]` is a view of it.

    Attributes:
        samples: of one client after another, int64 [M], on the CPU.
        offsets: int64 [clients + 1]; client k has samples[offsets[k] : offsets[k + 1]].
        moved: how many were taken from other clients, since the partition gave too few to some.

    >>> parts = Parts.of([torch.tensor([3, 1]), torch.tensor([2])])
    >>> len(parts), parts[-1], parts.sizes
    (2, tensor([2]), tensor([2, 1]))
    """

    samples: Tensor
    offsets: Tensor
    moved: int = 0

    @classmethod
    def of(cls, parts: Sequence[Tensor]) -> "Parts":
        """Join a sequence of index tensors. Raises FLError for masks, floats and negative indices."""
        if isinstance(parts, cls):
            return parts
        samples = torch.cat([torch.empty(0, dtype=torch.int64), *map(_indices, parts)])
        if len(samples) and samples.min() < 0:
            raise FLError(f"sample {samples.min()} of a split: indices begin at 0", code="data")
        return cls(samples, torch.tensor([0, *map(len, parts)]).cumsum(0))

    @classmethod
    def of_owners(cls, owners: np.ndarray, clients: int, samples: np.ndarray | None = None) -> "Parts":
        """Collect each client's samples, ascending, from the client of each sample.

        Args:
            owners: the client of each sample, [M]; -1 for none.
            samples: [M]; by default 0, 1, 2, ...

        >>> list(Parts.of_owners(np.array([1, -1, 0, 1]), clients=2))
        [tensor([2]), tensor([0, 3])]
        """
        samples = np.arange(len(owners)) if samples is None else samples
        taken = owners >= 0
        owners, samples = owners[taken], samples[taken]
        ends = np.bincount(owners, minlength=clients).cumsum()
        base = samples.max(initial=0) + 1  # one sort of one number for both, several times faster than lexsort
        ordered = np.sort(owners * base + samples) % base
        return cls(torch.from_numpy(ordered), torch.from_numpy(np.append(0, ends)))

    def divide(self, marks: Tensor) -> tuple["Parts", "Parts"]:
        """Divide each client's samples into those that are not marked and those that are.

        Args:
            marks: bool, for every sample of the data set.

        >>> parts = Parts.of([torch.tensor([3, 1]), torch.tensor([2])])
        >>> rest, marked = parts.divide(torch.tensor([0, 1, 1, 0]).bool())
        >>> rest[0], marked[0], marked[1]
        (tensor([3]), tensor([1]), tensor([2]))
        """
        owners, chosen = self.owners.numpy(), marks[self.samples].numpy()
        rest, marked = (
            Parts.of_owners(np.where(some, owners, -1), len(self), self.samples.numpy()) for some in (~chosen, chosen)
        )
        return replace(rest, moved=self.moved), marked

    @property
    def sizes(self) -> Tensor:
        """The number of samples of each client, int64 [clients]."""
        return self.offsets.diff()

    @property
    def owners(self) -> Tensor:
        """The client of each sample, int64 [M]."""
        return torch.arange(len(self)).repeat_interleave(self.sizes)

    @cached_property
    def largest(self) -> int:
        """The number of samples of the client that has most; 0 without clients."""
        return max(self.sizes.tolist(), default=0)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, key):
        if isinstance(key, slice):
            return [self[k] for k in range(len(self))[key]]
        k = range(len(self))[key]
        begin, end = self.offsets[k : k + 2].tolist()
        return self.samples[begin:end]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.samples.split(self.sizes.tolist()))


def _indices(part: Tensor) -> Tensor:
    """Return a client's samples as int64 [n] on the CPU. An empty tensor may have any dtype."""
    part = torch.as_tensor(part, device="cpu")
    if part.ndim != 1 or (len(part) and (part.is_floating_point() or part.dtype == torch.bool)):
        raise FLError(
            f"a client's samples are {part.dtype} {list(part.shape)}: give their indices, such as mask.nonzero()[:, 0]",
            code="data",
        )
    return part.long()


@dataclass(frozen=True, eq=False)
class Splits(Sequence[Split]):
    """The `Split` of each client, kept as three `Parts`; `splits[k]` gives views.

    >>> splits = Splits.of([Split(torch.arange(3), torch.tensor([3]), torch.tensor([4]))])
    >>> splits[0].train, splits.test.samples
    (tensor([0, 1, 2]), tensor([4]))
    """

    train: Parts
    valid: Parts
    test: Parts

    @classmethod
    def of(cls, splits: Sequence[Split]) -> "Splits":
        """Join any sequence of `Split`."""
        return splits if isinstance(splits, cls) else cls(*(Parts.of([split[i] for split in splits]) for i in range(3)))

    def __post_init__(self) -> None:
        if not len(self.train) == len(self.valid) == len(self.test):
            raise FLError(
                f"training, validation and test samples of {len(self.train)}, {len(self.valid)} and {len(self.test)} "
                "clients: give an index tensor, empty if need be, for each client and part"
            )

    @property
    def total(self) -> int:
        """The number of samples that clients have; one of several clients counts once."""
        samples = torch.cat([parts.samples for parts in (self.train, self.valid, self.test)])
        there = torch.zeros(int(samples.max()) + 1 if len(samples) else 0, dtype=torch.bool)
        there[samples] = True
        return int(there.sum())

    def __len__(self) -> int:
        return len(self.train)

    def __getitem__(self, key):
        if isinstance(key, slice):
            return [self[k] for k in range(len(self))[key]]
        return Split(self.train[key], self.valid[key], self.test[key])

    def __iter__(self) -> Iterator[Split]:
        return map(Split, self.train, self.valid, self.test)


def check_all_have(parts: Parts, names: Sequence[str], noun: str, way: str) -> None:
    """Raise FLError unless every client has samples of its own.

    Args:
        names: of the clients; none: they go by their numbers.
        noun: what they are called. way: out.
    """
    if len(lack := (parts.sizes == 0).nonzero()[:, 0].tolist()):
        called = [names[client] if names else f"client {client}" for client in lack]
        some = ", ".join(called[:5]) + f" and {len(lack) - 5} more" * (len(lack) > 5)
        raise FLError(
            f"{some} {'have' if len(lack) > 1 else 'has'} no {noun}, and other clients have: {way}", code="data"
        )


def _enough(valid: float, test: float) -> int:
    """Return how many samples are enough for shares of any client with as many.

    It is 0 if a thousand are not enough.

    >>> _enough(0, 0.01), _enough(0.1, 0.1), _enough(0.5, 0.49), _enough(0.5, 0.4999)
    (2, 3, 100, 0)
    """
    sizes = np.arange(1, 1001)
    held = sum(np.maximum(np.rint(share * sizes), share > 0) for share in (valid, test))
    enough = int(np.flatnonzero(held >= sizes).max(initial=-1)) + 2
    return enough if enough <= len(sizes) else 0


def hold_out(parts: Sequence[Tensor], valid: float, test: float, rng: np.random.Generator) -> Splits:
    """Split each client's samples at random into training, validation and test.

    A part whose share is 0 is empty. The other parts, and training, have one sample at least.

    Raises:
        FLError: for shares that leave nothing to train on, to all clients or to one.

    >>> split = hold_out([torch.arange(10)], valid=0.1, test=0.2, rng=np.random.default_rng(0))[0]
    >>> [len(part) for part in split]
    [7, 1, 2]
    """
    if not (valid >= 0 and test >= 0 and valid + test < 1):
        raise FLError(f"--local-valid {valid} and --local-test {test} must be shares with a sum below 1")
    parts = Parts.of(parts)
    samples, sizes, starts = parts.samples.numpy(), parts.sizes.numpy(), parts.offsets[:-1].numpy()
    place = np.zeros(len(samples), dtype=np.int8)  # 0 train, 1 valid, 2 test
    if valid or test:
        v, t = (np.maximum(np.rint(share * sizes), share > 0).astype(np.int64) for share in (valid, test))
        if len(few := np.flatnonzero(v + t >= sizes)):
            size = int(sizes[few[0]])
            ways = (
                [f"give clients {enough} or more (--min-samples {enough})"] if (enough := _enough(valid, test)) else []
            )
            if not ways or size > (valid > 0) + (test > 0):
                ways.append("use smaller shares")
            raise FLError(
                f"client {few[0]} has {size} sample{'s' * (size > 1)}, too few to train on and to hold out "
                f"--local-valid {valid} and --local-test {test} of: {', or '.join(ways)}"
            )
        order = np.concatenate([start + rng.permutation(n) for start, n in zip(starts, sizes)])
        left = np.repeat(starts + sizes, sizes) - np.arange(len(samples))  # from each position to the client's end
        place[order] = np.where(left <= np.repeat(t, sizes), 2, left <= np.repeat(v + t, sizes))
    owners = np.repeat(np.arange(len(parts)), sizes)
    return Splits(*(Parts.of_owners(owners[place == k], len(parts), samples[place == k]) for k in range(3)))
