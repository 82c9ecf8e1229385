"""The value of a given rank among many, without sorting and without holding them in memory."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from surgery.lazy import SLAB

_DIGIT = 16  # bits that one pass over the values decides


def of_rank(slabs: Callable[[], Iterator[Tensor]], size: int, rank: int) -> Tensor:
    """The value of a rank, from 0 for the smallest, among values that are not negative; NaN counts as the largest.

    Bit patterns of such floats are ordered as the floats are, so that counting leading bits finds the value, 16 bits in
    each pass: two passes for float32, four for float64 (least significant digit last, as radix sorts do).

    Args:
        slabs: a function that gives all values from the beginning, as flat tensors of float32 or float64.
        size: how many values there are.
        rank: in 0, ..., size - 1.

    >>> of_rank(lambda: iter([torch.tensor([3.0, 0.0]), torch.tensor([7.0, 1.0])]), 4, 2)
    tensor(3.)
    """
    if size <= SLAB:
        return torch.cat(list(slabs())).kthvalue(rank + 1).values
    known, bits = 0, None
    while bits is None or bits:
        counts, dtype = None, None
        for slab in slabs():
            dtype = slab.dtype
            pattern = slab.view(torch.int32 if dtype is torch.float32 else torch.int64)
            width = 32 if dtype is torch.float32 else 64
            shift = (width if bits is None else bits) - _DIGIT
            if bits is not None:
                pattern = pattern[pattern >> bits == known]
            found = (pattern >> shift & (1 << _DIGIT) - 1).bincount(minlength=1 << _DIGIT)
            counts = found if counts is None else counts.add_(found)
        total = counts.cumsum(0)
        digit = int((total <= rank).sum())
        rank -= int(total[digit - 1]) if digit else 0
        known, bits = known << _DIGIT | digit, shift
    integer = torch.int32 if dtype is torch.float32 else torch.int64
    return torch.tensor(known, dtype=integer, device=counts.device).view(dtype)
