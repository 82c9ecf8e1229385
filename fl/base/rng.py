"""Randomness by (seed, purpose, round, client), without a global generator.

Whatever is random (sampling, batches, permutations, partitions, initial weights) asks for a stream of its own, so
a resumed run sees the same numbers as an uninterrupted one, and clients do not depend on each other's order.
"""

import zlib
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Rng:
    """The random streams of one round of one run.

    >>> a, b = Rng(0, round=3), Rng(0, round=3)
    >>> torch.equal(torch.rand(2, generator=a.torch("batches", 7)), torch.rand(2, generator=b.torch("batches", 7)))
    True
    """

    seed: int
    round: int = 0

    def torch(self, purpose: str, client: int = 0) -> torch.Generator:
        """Make a fresh torch generator, on the CPU, for one purpose and client."""
        words = self._sequence(purpose, client).generate_state(2, np.uint32).tolist()
        return torch.Generator().manual_seed(words[0] << 31 ^ words[1])

    def numpy(self, purpose: str, client: int = 0) -> np.random.Generator:
        """Make a fresh NumPy generator for one purpose and client."""
        return np.random.default_rng(self._sequence(purpose, client))

    def apart(self, purpose: str) -> "Rng":
        """Make streams of the same round that share nothing with these.

        They are for another training in that round.
        """
        return Rng(int(self.numpy(purpose).integers(2**63)), self.round)

    def _sequence(self, purpose: str, client: int) -> np.random.SeedSequence:
        return np.random.SeedSequence([self.seed, zlib.crc32(purpose.encode()), self.round, client])


def draw(n: int, k: int, generator: torch.Generator) -> list[int]:
    """Draw k distinct numbers below n, uniformly and in random order.

    Time and memory do not grow with n.

    They are the first k of torch.randperm(n); from some 200 million (2^32 / 20) on, that gives other numbers.

    >>> draw(10**12, 3, Rng(0).torch("sample")) == draw(10**12, 4, Rng(0).torch("sample"))[:3]
    True
    """
    moved, drawn = {}, []
    for i in range(k):  # a Fisher-Yates shuffle that remembers only what is not in its own place any more
        j = i + int(torch.randint(n - i, (), generator=generator))
        drawn.append(moved.get(j, j))
        moved[j] = moved.get(i, i)
    return drawn
