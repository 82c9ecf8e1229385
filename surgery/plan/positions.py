"""Positions along a tensor's axes, as ranges; reading and writing tensors there."""

import math
import operator
from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Parameter

from surgery.errors import SurgeryError
from surgery.transfer import upload

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # half-open ranges [start, stop) of one axis, in the order of reading
Index: TypeAlias = tuple[Ranges | None, ...]  # one entry for each axis; None is the whole axis

_MANY = 512  # pieces at most that are written as views; more take less time in one scatter
_FEW = 64  # ranges at most that are read as views; more take less time in one gather


class Source(NamedTuple):
    """A tensor of the full model, and positions along each of its axes."""

    name: str
    index: Index  # type: ignore[assignment]  # tuples have a method of this name


def as_runs(positions: Iterable[int]) -> Ranges:
    """Return positions, in any order, as ranges.

    >>> as_runs([0, 1, 2, 5, 6]), as_runs([3, 1, 2]), as_runs([0, 0])
    (((0, 3), (5, 7)), ((3, 4), (1, 3)), ((0, 1), (0, 1)))
    """
    return merge_ranges((p, p + 1) for p in map(operator.index, positions))


def merge_ranges(runs: Iterable[tuple[int, int]]) -> Ranges:
    """Join each range that continues the one before it. The order stays.

    >>> merge_ranges([(0, 2), (2, 3), (5, 6)])
    ((0, 3), (5, 6))
    """
    result: list[tuple[int, int]] = []
    for start, stop in runs:
        if result and result[-1][1] == start:
            start = result.pop()[0]
        result.append((start, stop))
    return tuple(result)


def positions(runs: Ranges) -> list[int]:
    """Return the positions that ranges hold, in their order.

    >>> positions(((3, 4), (1, 3)))
    [3, 1, 2]
    """
    return [p for start, stop in runs for p in range(start, stop)]


def as_index(index: Iterable) -> Index:
    """Convert an index of lists and any integers to tuples of ints.

    Raises TypeError or ValueError for other values.
    """
    whole = operator.index

    def as_tuples(runs: Iterable) -> Ranges:
        if type(runs) is tuple and all(type(r) is tuple and tuple(map(type, r)) == (int, int) for r in runs):
            return runs  # no copy: many tensors share them
        return tuple((whole(a), whole(b)) for a, b in runs)

    return tuple([None if runs is None else as_tuples(runs) for runs in index])


def shape_at(name: str, index: Index, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the elements at an index; SurgeryError if it does not fit."""
    if len(index) != len(shape):
        raise SurgeryError(f"the index of {name!r} has {len(index)} axes, the tensor {len(shape)}", code="plan")
    for runs, size in zip(index, shape):
        if runs is not None and (not runs or any(not 0 <= start < stop <= size for start, stop in runs)):
            shown = f"{list(runs)}" if len(runs) < 9 else f"{list(runs[:8])}..."
            raise SurgeryError(
                f"{shown}: give ranges (start, stop) with 0 <= start < stop <= {size} for {name!r}, at least one",
                code="plan",
            )
    return tuple(size if runs is None else sum(b - a for a, b in runs) for runs, size in zip(index, shape))


def chain(outer: Index, inner: Index, shape: tuple[int, ...]) -> Index:
    """Return the index that reads `inner` from the result of `outer`.

    `shape` is the shape before both.

    >>> chain((((4, 8),), ((1, 2), (0, 1))), (((1, 3),), ((1, 2), (0, 1))), (8, 2))
    (((5, 7),), None)
    """
    result = []
    for first, second, size in zip(outer, inner, shape):
        if first is None or second is None:
            runs = merge_ranges(second or first or ((0, size),))
        else:
            outer_positions = positions(first)
            runs = as_runs(outer_positions[p] for p in positions(second))
        result.append(None if runs == ((0, size),) or not size else runs)
    return tuple(result)


def overlapping(a: Index, b: Index, shape: tuple[int, ...]) -> bool:
    """Return whether two indices of a tensor of a shape have an element in common.

    >>> overlapping((((0, 2),), None), (((2, 3),), None), (3, 4)), overlapping((), (), ())
    (False, True)
    """
    return all(
        size and (x is None or y is None or not set(positions(x)).isdisjoint(positions(y)))
        for x, y, size in zip(a, b, shape)
    )


def is_whole(index: Index) -> bool:
    """Return whether an index holds all positions of every axis, in their order."""
    return all(runs is None for runs in index)


def repeats(index: Index) -> bool:
    """Return whether an index holds a position of some axis more than once."""
    return any(runs is not None and len(set(all_positions := positions(runs))) < len(all_positions) for runs in index)


def take(full: Tensor, index: Index, lead: int = 0) -> Tensor:
    """Return a copy of the elements at an index.

    The tensor has `lead` further axes in front.
    """
    plain = type(full) in (Tensor, Parameter) and full.layout is torch.strided and not full.is_quantized
    has_history = full.requires_grad and torch.is_grad_enabled()
    if full.is_meta and plain and full.is_contiguous() and not has_history:  # a form alone, without views
        shape = [size if runs is None else sum(b - a for a, b in runs) for size, runs in zip(full.shape[lead:], index)]
        return full.new_empty((*full.shape[:lead], *shape))
    copied = False
    for axis, runs in enumerate(index, lead):
        if runs is not None:
            full, copied = _select(full, axis, runs), len(runs) > 1
    return full if copied else full.clone()


def put(full: Tensor, index: Index, small: Tensor, lead: int = 0) -> None:
    """Write a tensor to the elements of `full` at an index, in place.

    The inverse of `take`. If several positions of the small tensor lie at one position, the first is written.

    >>> full = torch.zeros(4)
    >>> put(full, (((3, 4), (0, 1), (3, 4)),), torch.tensor([1.0, 2.0, 3.0]))
    >>> full
    tensor([2., 0., 0., 1.])
    """
    small, index = ascending(small, index, lead)
    if is_scatter_faster(index):
        full[grid(index, full, lead)] = small.to(full)
        return
    for place, piece in pieces(full, small, index, lead):
        place.copy_(piece)


def ascending(small: Tensor, index: Index, lead: int = 0) -> tuple[Tensor, Index]:
    """Sort the positions of a tensor and its index, and keep each position once.

    Of elements at one position the first stays. An axis that is ascending already is not copied.

    >>> ascending(torch.tensor([5, 6, 7]), (((3, 4), (1, 2), (3, 4)),))
    (tensor([6, 5]), (((1, 2), (3, 4)),))
    """
    result = list(index)
    for axis, runs in enumerate(index):
        if runs is not None and any(stop > start for (_, stop), (start, _) in pairwise(runs)):
            first: dict[int, int] = {}
            for place, position in enumerate(positions(runs)):
                first.setdefault(position, place)
            order = sorted(first)
            small, result[axis] = _select(small, axis + lead, as_runs(map(first.get, order))), as_runs(order)
    return small, tuple(result)


def pieces(full: Tensor, small: Tensor, index: Index, lead: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of views that pair each element of `small` with its place in `full`.

    With views, writing, adding and filling need no index tensors and are as fast as a copy. The index must be
    ascending.
    """
    many = [axis for axis, runs in enumerate(index) if runs is not None and len(runs) > 1]
    for axis, runs in enumerate(index):
        if runs is not None and len(runs) == 1:
            full = full.narrow(axis + lead, runs[0][0], runs[0][1] - runs[0][0])
    if not many:
        yield full, small
        return
    axis, offset = many[0], 0
    rest = tuple(None if i == axis or (runs is not None and len(runs) == 1) else runs for i, runs in enumerate(index))
    for start, stop in index[axis]:
        length = stop - start
        part = full.narrow(axis + lead, start, length)
        yield from pieces(part, small.narrow(axis + lead, offset, length), rest, lead)
        offset += length


def is_scatter_faster(index: Index) -> bool:
    """Return whether one scatter takes less time than a view for each piece."""
    return math.prod(len(runs) for runs in index if runs is not None) > _MANY


def grid(index: Index, like: Tensor, lead: int = 0) -> tuple[Tensor, ...]:
    """Return index tensors: `full[grid(index, full)]` is a copy of the elements.

    >>> full = torch.arange(6).reshape(2, 3)
    >>> full[grid((None, ((0, 1), (2, 3))), full)]
    tensor([[0, 2],
            [3, 5]])
    """
    full_index = (*[None] * lead, *index)
    places = [range(size) if runs is None else positions(runs) for runs, size in zip(full_index, like.shape)]
    return torch.meshgrid(*(upload(torch.tensor(p), like.device) for p in places), indexing="ij")


def _select(tensor: Tensor, axis: int, runs: Ranges) -> Tensor:
    """Return positions of one axis in the same memory format.

    The result is a view if the positions are one range.
    """
    if len(runs) == 1:
        return tensor.narrow(axis, runs[0][0], runs[0][1] - runs[0][0])
    if len(runs) <= _FEW:
        return torch.cat([tensor.narrow(axis, start, stop - start) for start, stop in runs], axis)
    chosen = upload(torch.tensor(positions(runs)), tensor.device)
    if tensor.ndim in (4, 5) and tensor.stride(1) == 1 < tensor.stride(-1):  # channels last: a gather would not keep it
        moved = {0: 0, 1: tensor.ndim - 1}.get(axis, axis - 1)
        return tensor.movedim(1, -1).index_select(moved, chosen).movedim(-1, 1)
    return tensor.index_select(axis, chosen)
