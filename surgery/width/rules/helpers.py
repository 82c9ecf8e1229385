"""What several rules need."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from surgery.width.axes import Axis, Why, find, fix, mark_grouping, picked, regroup, role, unify
from surgery.width.rules.registry import View

COUNTED = picked("data decide how many positions it has")
"""The reason of axes whose size may be another one in a narrow model."""


def first(args: dict[str, Any], names: str) -> Any:
    """The first of these arguments that an operation has; variants of one operation name them differently."""
    return next((args[name] for name in names.split() if name in args), None)


def tensors(args: dict[str, Any]) -> list[Tensor]:
    """The arguments that are tensors."""
    return [value for value in args.values() if isinstance(value, Tensor)]


def results(out: Any) -> list[Tensor]:
    """The tensors that an operation returned."""
    return [t for t in (out if isinstance(out, list | tuple) else [out]) if isinstance(t, Tensor)]


def dims_of(args: dict[str, Any], ndim: int) -> list[int]:
    """The dimensions that an operation works along, from 0; all of them if it is not told."""
    dims = first(args, "dim dims")
    if dims is None or dims == []:
        return list(range(ndim))
    return sorted({dim % max(ndim, 1) for dim in ([dims] if isinstance(dims, int) else dims)})


def fresh(shape: Iterable[int], why: Why | None = None) -> list[Axis]:
    """New axes of these sizes."""
    return [Axis(size, why) for size in shape]


def fitting(found: Iterable[Axis], shape: Iterable[int]) -> list[Axis]:
    """These axes, and new ones where a size differs or there are no more."""
    found = list(found)
    return [found[i] if i < len(found) and found[i].size == size else Axis(size) for i, size in enumerate(shape)]


def unify_all(several: Iterable[Sequence[Axis]]) -> None:
    """Several tensors have the same axes."""
    whole = list(several)
    for other in whole[1:]:
        for x, y in zip(whole[0], other):
            unify(x, y)


def unify_last(found: Sequence[Axis], other: Sequence[Axis]) -> None:
    """The last axes of two tensors are the same, where their sizes are: one was broadcast against the other."""
    for x, y in zip(reversed(found), reversed(other)):
        if x.size == y.size:
            unify(x, y)


def broadcast(view: View, given: Iterable[Tensor], shape: Sequence[int]) -> list[Axis]:
    """The axes of tensors that were broadcast against each other."""
    return broadcast_axes([view.axes_of(tensor) for tensor in given], shape)


def broadcast_axes(given: Sequence[Sequence[Axis]], shape: Sequence[int]) -> list[Axis]:
    """These axes broadcast against each other."""
    result = []
    for position in range(1, len(shape) + 1):
        same = [found[-position] for found in given if len(found) >= position]
        same = [axis for axis in same if axis.size == shape[-position]]
        for other in same[1:]:
            unify(same[0], other)
        result.append(find(same[0]) if same else Axis(shape[-position]))
    return result[::-1]


def told_apart(
    view: View, given: Iterable[Tensor], out: Any, why: Why = picked("positions are picked by data")
) -> list[list[Axis]]:
    """Data or memory decide which positions are picked, so all axes stay whole; `why` is the reason of the results'."""
    for tensor in given:
        for axis in view.axes_of(tensor):
            fix(axis, picked("positions are picked by data"))
    return [fresh(result.shape, why) for result in results(out)]


def grouped(axis: Axis, groups: int) -> list[Axis]:
    """The two digits of an axis: which group, and which position within it."""
    which, within = regroup([axis], [groups, axis.size // groups])
    mark_grouping(which, "groups")
    return [which, within]


def windowed(found: Sequence[Axis], sizes: Sequence[int], window: Sequence[int]) -> tuple[list[Axis], list[Axis]]:
    """Axes that a window of these lengths slid over, and those of them whose positions must have no gap."""
    kept, ordered = [], []
    for axis, size, length in zip(found, sizes, window):
        if axis.size != size:
            fix(axis, role("a window slides over it"))
            axis = Axis(size, role("a window slides over it"))
        elif length > 1:
            ordered.append(axis)
        kept.append(axis)
    return kept, ordered
