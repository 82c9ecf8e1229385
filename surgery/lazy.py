"""Tensors read piece by piece, so that models larger than memory can be merged."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from threading import Lock
from typing import TypeAlias

import torch
from torch import Tensor

SLAB = 1 << 18
"""Elements that are computed at a time: as many as fit into a CPU's cache together with their copies."""

Reader: TypeAlias = Callable[[int, int], Tensor]
"""A function from (start, stop) to the elements start, ..., stop - 1 of a tensor in row-major order, [stop - start]."""


@dataclass(frozen=True)
class Pieces:
    """A tensor that is read one stretch of elements at a time.

    >>> pieces = Pieces.of(torch.arange(6.0).view(2, 3))
    >>> pieces.read(2, 4), pieces.size, pieces.whole().shape
    (tensor([2., 3.]), 6, torch.Size([2, 3]))
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Reader
    device: torch.device = torch.device("cpu")

    @classmethod
    def of(cls, tensor: Tensor) -> "Pieces":
        """Return the pieces of a tensor in memory, as views of a contiguous one."""
        tensor = tensor.detach().resolve_conj()
        flat: list[Tensor] = []

        def read(start: int, stop: int) -> Tensor:
            if not flat:
                flat.append(tensor.reshape(-1))
            return flat[0][start:stop]

        return cls(tuple(tensor.shape), tensor.dtype, read, tensor.device)

    @classmethod
    def from_function(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        make: Callable[[], Tensor],
        device: torch.device = torch.device("cpu"),
    ) -> "Pieces":
        """Return pieces of a tensor; the first makes it whole, the last drops it."""
        lock, cache = Lock(), []

        def read(start: int, stop: int) -> Tensor:
            with lock:
                if not cache:
                    cache.append(make().reshape(-1))
                flat = cache[0]
                if stop == len(flat) and start + SLAB >= stop:
                    cache.clear()
            return flat[start:stop]

        return cls(shape, dtype, read, device)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes of the whole tensor."""
        return self.size * self.dtype.itemsize

    def whole(self) -> Tensor:
        """Return the tensor, as a copy in memory."""
        result = torch.empty(self.size, dtype=self.dtype, device=self.device)
        for start, stop in spans(self.size):
            result[start:stop] = self.read(start, stop)
        return result.view(self.shape)

    def meta(self) -> Tensor:
        """Return a tensor of the same shape and dtype without data."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")


class LazyState(Mapping[str, Tensor]):
    """A state that reads or computes a tensor at each access, and does not keep it.

    `surgery.merging` takes such states and gives them; `surgery.files.write` writes them slab by slab.

    Args:
        entries: the tensors by name.
        label: what errors call it, such as the path of its file.

    >>> lazy = LazyState({"w": Pieces.of(torch.ones(2))})
    >>> lazy["w"], lazy.pieces("w").shape
    (tensor([1., 1.]), (2,))
    """

    def __init__(self, entries: Mapping[str, Pieces], label: str = "") -> None:
        self._entries, self.label = dict(entries), label

    def __getitem__(self, name: str) -> Tensor:
        return self._entries[name].whole()

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def pieces(self, name: str) -> Pieces:
        """Return a tensor by pieces."""
        return self._entries[name]

    def __repr__(self) -> str:
        size = sum(pieces.nbytes for pieces in self._entries.values())
        return f"{type(self).__name__} {self.label}".rstrip() + f": {len(self)} tensors, {size / 1e6:,.1f} MB"


def pieces_of(values: Mapping[str, Tensor], name: str) -> Pieces:
    """Return a tensor of a state by pieces; a lazy state is not read."""
    return values.pieces(name) if isinstance(values, LazyState) else Pieces.of(values[name])


def metas(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a state without their data; a lazy state is not read."""
    return {name: pieces_of(values, name).meta() for name in values}


def spans(size: int, length: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (start, stop) of stretches that cover 0, ..., size - 1; SLAB by default.

    >>> list(spans(5, 2))
    [(0, 2), (2, 4), (4, 5)]
    """
    step = length or SLAB
    for start in range(0, size, step):
        yield start, min(start + step, size)
