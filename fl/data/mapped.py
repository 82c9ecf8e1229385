"""Tensors in memory-mapped files, read a piece at a time and then released."""

import mmap
import warnings
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

_PIECE = 2**26  # bytes of memory-mapped data that are read at a time
_ROWS = 32  # single rows of them that are read at a time
_MAPS: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
"""The memory maps that tensors lie in, by their address."""


def _map_of(values: Tensor) -> mmap.mmap | None:
    return _MAPS.get(values.untyped_storage().data_ptr()) if values.device.type == "cpu" else None


def is_mapped(values: Tensor) -> bool:
    """Return whether a tensor lies in a memory-mapped file."""
    return bool(_MAPS) and _map_of(values) is not None


def release(values: Tensor) -> None:
    """Release the pages of a memory-mapped tensor; they are read again when needed.

    Otherwise a process seems to take as much memory as it has ever read of the file.
    """
    if (mapped := _map_of(values)) is not None and hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED)


def pieces(values: Tensor) -> Iterator[Tensor]:
    """Yield views of a tensor, one after another; memory-mapped, of about 64 MB each."""
    if not is_mapped(values):
        yield values
        return
    for piece in values.split(max(1, _PIECE * len(values) // max(1, values.nbytes))):
        yield piece
        release(values)


def rows(values: Tensor, index: Tensor) -> Tensor:
    """Return the rows of an index [n, ...], in new memory.

    It is `values[index]`, for a memory-mapped tensor a few rows at a time.

    A system maps more of a file than is read: up to some megabytes for every row that lies apart from others.
    """
    if not is_mapped(values):
        return values[index]
    parts = []
    for some in index.split(_ROWS):
        parts.append(values[some])
        release(values)
    return torch.cat(parts)


def value_range(values: Tensor) -> tuple[float, float]:
    """Return the least and the largest value, as Python's numbers."""
    ends = [tuple(end.item() for end in piece.aminmax()) for piece in pieces(values)]
    return min(least for least, _ in ends), max(most for _, most in ends)


def from_array(array: np.ndarray) -> Tensor:
    """Return an array as a tensor: a memory-mapped one in the same memory.

    Another one that is read only is copied.
    """
    if (mapped := _mapping_of(array)) is None:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one that is read only: nothing is written to what a user gives
        tensor = torch.from_numpy(array)
    _MAPS[tensor.untyped_storage().data_ptr()] = mapped
    return tensor


def _mapping_of(array: Any) -> mmap.mmap | None:
    """Return the memory map that an array is a view of."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, mmap.mmap) else None
