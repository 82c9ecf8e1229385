"""The one definition of batches, which every backend follows."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from fl.rng import Rng


class Batches(NamedTuple):
    """What K clients train on in one round.

    Attributes:
        index: samples of every step, int64 [K, S, B], S the largest number of steps; rows past a client's
            own steps are padding that nobody reads.
        keys: a random number for each client and step, int32 [K, S], from which everything else that is random in
            the step is drawn (see `fl.draws`).
        steps: each client's number of steps, known on the host.
    """

    index: Tensor
    keys: Tensor
    steps: tuple[int, ...]


def make_batches(
    parts: Sequence[Tensor],
    clients: Sequence[int],
    epochs: int,
    size: int,
    rng: Rng,
    device: torch.device | str,
    repeats: int = 1,
) -> Batches:
    """Batches of exactly `size` for each client and epoch, in the order of a fresh permutation.

    The last batch of an epoch is filled from the start of the same permutation, cyclically where a client has
    fewer than `size` samples. What a client sees depends on (seed, round, client) alone.

    Args:
        parts: the training indices of each of the K clients.
        clients: their numbers, which select their random streams.
        repeats: steps on each batch before the next.

    >>> batches = make_batches([torch.arange(3)], [0], epochs=1, size=2, rng=Rng(0), device="cpu")
    >>> batches.steps, batches.index.shape, batches.index[0].flatten()[:3].sort().values
    ((2,), torch.Size([1, 2, 2]), tensor([0, 1, 2]))
    """
    rows, keys = [], []
    for client, part in zip(clients, parts):
        n, generator = len(part), rng.torch("batches", int(client))
        positions = torch.arange(-(-n // size) * size) % n
        epoch_rows = [part[torch.randperm(n, generator=generator)[positions]] for _ in range(epochs)]
        rows.append(torch.cat(epoch_rows).view(-1, size))
        rows[-1] = rows[-1].repeat_interleave(repeats, 0)
        keys.append(torch.randint(-(2**31), 2**31, (len(rows[-1]),), generator=generator, dtype=torch.int32))
    index, numbers = (pad_sequence(part, batch_first=True).to(device, non_blocking=True) for part in (rows, keys))
    return Batches(index, numbers, tuple(len(r) for r in rows))
