"""The one definition of batches, which every backend follows."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fl.base.errors import ask_memory
from fl.base.rng import Rng
from fl.engine.augment import Augment
from surgery.transfer import upload

LAST_BATCHES = ("filled", "partial")
"""What the last batch of an epoch holds: as many samples as the others, some of them again, or those that are left."""


def count_filled(samples: int, size: int) -> int:
    """Return the number of samples of an epoch with its last batch filled up.

    >>> count_filled(20, 10), count_filled(21, 10)
    (20, 30)
    """
    return -(-samples // size) * size


class StepInput(NamedTuple):
    """The input of one step of a client; for several clients, with leading axes.

    Attributes:
        index: the samples, int64 [*leading, B].
        key: a random number of 32 bits, int64 [*leading]; everything random in the step depends on it
            (`fl.engine.draws`).
        places: where augmented images are cut out (`Augment.draw`), int64 [*leading, B, 2]; None without augmentation.
    """

    index: Tensor
    key: Tensor
    places: Tensor | None


class Batches(NamedTuple):
    """The batches on which K clients train in one round.

    Attributes:
        rows: every step as a row of numbers, int64 [K, S, W], where S is the largest number of steps: its samples, its
            key and, for augmented images, their places. `step` takes them apart. Rows after a client's own steps are
            padding that is never read.
        size: samples of a step.
        steps: each client's number of steps, known on the host.
        augment: how the samples are changed at random.
        real: with partial last batches the number of samples in each step of each client, the others only fill it up
            to one shape for all; None: all samples count, also those that fill up.
    """

    rows: Tensor
    size: int
    steps: tuple[int, ...]
    augment: Augment = Augment()
    real: tuple[tuple[int, ...], ...] | None = None

    def step(self, rows: Tensor) -> StepInput:
        """Return the steps that rows [*leading, W] stand for, as views of them."""
        index, key, places = rows.tensor_split((self.size, self.size + 1), dim=-1)
        return StepInput(index, key[..., 0], places.unflatten(-1, (self.size, 2)) if self.augment.moves else None)

    def client_step(self, k: int, s: int) -> StepInput:
        """Return the s-th step of the k-th client, with its real samples only."""
        index, key, places = self.step(self.rows[k, s])
        count = self.size if self.real is None else self.real[k][s]
        return StepInput(index[:count], key, None if places is None else places[:count])

    @property
    def index(self) -> Tensor:
        """The samples of every step, int64 [K, S, B]."""
        return self.step(self.rows).index

    @property
    def keys(self) -> Tensor:
        """The key of every step, int64 [K, S]."""
        return self.step(self.rows).key


def make_batches(
    parts: Sequence[Tensor],
    clients: Sequence[int],
    epochs: int,
    size: int,
    rng: Rng,
    device: torch.device | str,
    repeats: int = 1,
    augment: Augment = Augment(),
    width: int = 0,
    last: str = "filled",
    limits: Sequence[int] | None = None,
) -> Batches:
    """Return batches of exactly `size`, in a fresh permutation each epoch.

    The last batch of an epoch is filled from the start of the same permutation, cyclically where a client has
    fewer than `size` samples. These samples count once more, unless the last batch is to be partial: then each sample
    counts once in an epoch, as with a DataLoader of torch. What a client sees depends only on (seed, round, client).

    Args:
        parts: the training indices of each of the K clients.
        clients: their numbers, which select their random streams.
        repeats: steps on each batch before the next.
        augment: how the samples are changed at random. width: of the images, in pixels, if these are cut or mirrored.
        last: one of `LAST_BATCHES`.
        limits: the most steps that each client makes, 1 or more; None: all of them.

    >>> batches = make_batches([torch.arange(3)], [0], epochs=1, size=2, rng=Rng(0), device="cpu")
    >>> batches.steps, batches.index.shape, batches.index[0].flatten()[:3].sort().values
    ((2,), torch.Size([1, 2, 2]), tensor([0, 1, 2]))
    """
    steps = max((count_filled(len(part), size) // size for part in parts), default=0) * epochs * repeats
    ask_memory(
        8 * len(parts) * steps * (size + 1),
        f"the batches of {epochs:,} epochs" + f" with {repeats:,} steps on each" * (repeats > 1),
        "use fewer of them",
    )
    rows, real = [], []
    for client, part in zip(clients, parts):
        n, generator = len(part), rng.torch("batches", int(client))
        positions = torch.arange(count_filled(n, size))
        epoch_rows = [part[torch.randperm(n, generator=generator)[positions % n]] for _ in range(epochs)]
        if last == "partial":
            counts = [min(size, n - at) for at in range(0, n, size) for _ in range(repeats)]
            real.append(tuple(counts * epochs))
        index = torch.cat(epoch_rows).view(-1, size).repeat_interleave(repeats, 0)
        keys = torch.randint(-(2**31), 2**31, (len(index),), generator=generator, dtype=torch.int32)
        rows.append(torch.cat([index, keys[:, None]], 1))
        if limits is not None:
            rows[-1], real[-1:] = rows[-1][: limits[len(rows) - 1]], [r[: limits[len(rows) - 1]] for r in real[-1:]]
    numbers = upload(pad_sequence(rows, batch_first=True), device)
    if augment.moves:
        places = augment.draw(numbers[..., -1], size, width)
        numbers = torch.cat([numbers, places.flatten(-2)], -1)
    return Batches(numbers, size, tuple(len(r) for r in rows), augment, tuple(real) if last == "partial" else None)
