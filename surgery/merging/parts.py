"""Parts of methods: combinations, inner products, ranks and random numbers."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from surgery import lazy
from surgery.errors import SurgeryError
from surgery.merging.driver import TensorGroup

_DIGIT = 16  # bits that one pass over the values decides
_BLOCK = 1 << 16  # elements whose random numbers come from one generator


def combination(group: TensorGroup, coefficients: Sequence[float]) -> lazy.Reader:
    """sum c_k x_k, or base + sum c_k (x_k - base).

    Tensors of coefficient 0 are not read. If one coefficient is 1 and all others are 0 the result is that tensor, bit
    for bit.
    """
    used = [(i, c) for i, c in enumerate(coefficients) if c]
    if len(used) == 1 and used[0][1] == 1:
        return lambda start, stop: group.value(used[0][0], start, stop)

    def read(start: int, stop: int) -> Tensor:
        total = None
        for i, c in used:
            part = group.delta(i, start, stop) * c
            total = part if total is None else total.add_(part)
        if group.base is None:
            return total
        return group.origin(start, stop) if total is None else total.add_(group.origin(start, stop))

    return read


def gram(group: TensorGroup) -> Tensor:
    """Return float64 inner products [K, K] of tensors, or of their task vectors.

    Raises:
        SurgeryError: for numbers so large that their squares are infinite.
    """
    k = len(group.tensors)
    result = torch.zeros(k, k, dtype=torch.float64, device=group.tensors[0].device)
    for start, stop in lazy.spans(group.size):
        rows = torch.stack([group.delta(i, start, stop).double() for i in range(k)])
        result += rows @ rows.T
    result = result.cpu()
    if bad := [whose for whose, finite in zip(group.whose, result.diagonal().isfinite().tolist()) if not finite]:
        raise SurgeryError(
            f"{group.name!r} of {bad[0]} is too large for a direction: leave that model out, or use linear",
            code="values",
        )
    return result


def of_rank(slabs: Callable[[], Iterator[Tensor]], size: int, rank: int) -> Tensor:
    """Return the value of a rank, from 0 for the smallest, of non-negative values.

    NaN counts as the largest.

    Nothing is sorted or held in memory: bit patterns of such floats are ordered as the floats are, so that counting
    leading bits finds the value, 16 bits in each pass: two passes for float32, four for float64 (least significant
    digit last, as radix sorts do).

    Args:
        slabs: a function that gives all values from the beginning, as flat tensors of float32 or float64.
        size: how many values there are.
        rank: in 0, ..., size - 1.

    >>> of_rank(lambda: iter([torch.tensor([3.0, 0.0]), torch.tensor([7.0, 1.0])]), 4, 2)
    tensor(3.)
    """
    if size <= lazy.SLAB:
        return torch.cat(list(slabs())).kthvalue(rank + 1).values
    dtype = next(slabs()).dtype
    shift = 32 if dtype is torch.float32 else 64
    integer, known = torch.int32 if dtype is torch.float32 else torch.int64, None
    while shift:
        counts: Any = 0
        shift -= _DIGIT
        for slab in slabs():
            pattern = slab.view(integer)
            if known is not None:
                pattern = pattern[pattern >> shift + _DIGIT == known]
            counts = counts + (pattern >> shift & (1 << _DIGIT) - 1).bincount(minlength=1 << _DIGIT)
        total = counts.cumsum(0)
        digit = int((total <= rank).sum())
        rank -= int(total[digit - 1]) if digit else 0
        known = (known or 0) << _DIGIT | digit
    return torch.tensor(known, dtype=integer, device=counts.device).view(dtype)


def uniform(seed: int, name: str, model: int, start: int, stop: int) -> Tensor:
    """Return numbers in [0, 1) for elements start, ..., stop - 1, the same each time.

    Which stretch is asked for, and in which order, does not change them.

    >>> torch.equal(uniform(0, "w", 1, 0, 9)[4:], uniform(0, "w", 1, 4, 9))
    True
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{model}/{name}".encode()).digest()[:7], "big")
    first, last = start // _BLOCK, -(-stop // _BLOCK)
    blocks = [torch.rand(_BLOCK, generator=torch.Generator().manual_seed(key + block)) for block in range(first, last)]
    return torch.cat(blocks)[start - first * _BLOCK : stop - first * _BLOCK] if blocks else torch.empty(0)
