"""Read what an operation makes of a number of an attribute: a size or a factor."""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from torch import Tensor

from surgery.width.axes import Axes, Axis
from surgery.width.provenance import Expression, Operation, plain
from surgery.width.steps import Step

A = TypeVar("A")  # an axis: of `surgery.width.axes` while a model is traced, of `surgery.width.solve` afterwards


class Read(NamedTuple, Generic[A]):
    """A call that took a number of the model's attributes.

    Attributes:
        number: how it was computed from them.
        axes: the axes that it may be the size of; they have its size.
        steps: the numbers of the steps that computed with it, where it is the size of no axis.
    """

    number: Expression
    axes: Sequence[A]
    steps: Sequence[int]


def read(
    number: Any,
    arguments: Sequence[Any],
    results: Sequence[Tensor],
    steps: Mapping[int, Step[Axis]],
    axes_of: Callable[[Tensor], Axes],
) -> Read[Axis]:
    """Return what a call made of a tracked number.

    Args:
        number: the number, one of the arguments or an item of one.
        arguments: of the call in Python.
        results: the tensors that the call returned.
        steps: by number the steps that it took.
        axes_of: the axes of a tensor.
    """
    expression, value = number.expression, plain(number)
    used = [
        key
        for key, step in steps.items()
        if any(value in (scalar if isinstance(scalar, tuple) else (scalar,)) for scalar in step.scalars.values())
    ]
    axes: list[Axis] = []
    if isinstance(value, int):
        if value < 0:  # it counts from the end
            expression, value = Operation(operator.mul, expression, -1), -value
        sizes = [size for step in steps.values() for size in step.numbers.values()]
        size_axes = [axis for size in sizes for axis in (size if isinstance(size, list) else [size])]
        placed = list(_find_placed(number, arguments, results, axes_of))
        result_axes = () if placed or used else [axis for tensor in results for axis in axes_of(tensor)]
        axes = [axis for axis in (*placed, *size_axes, *result_axes) if axis.size == value]
    # Attention on the meta device computes with the root of its scale: any step of the call may be the one.
    return Read(expression if axes else number.expression, axes, () if axes else used or list(steps))


def _find_placed(
    number: Any, arguments: Sequence[Any], results: Sequence[Tensor], axes_of: Callable[[Tensor], Axes]
) -> Iterator[Axis]:
    """Yield the axes that an argument is the size of, by its place in a call.

    There are none if the place says nothing. A call says the sizes of its result's axes (view), of some of them in a
    row (unflatten), or of its results (split).
    """
    for several in (arguments, *(value for value in arguments if isinstance(value, list | tuple))):
        numbers = [size for size in several if isinstance(size, int) and not isinstance(size, bool)]
        sizes, places = [plain(size) for size in numbers], [i for i, size in enumerate(numbers) if size is number]
        if len(results) == 1 and places and (several is not arguments or len(sizes) == results[0].ndim):
            shape = list(results[0].shape)
            starts = [i for i in range(len(shape) - len(sizes) + 1) if _fit(sizes, shape[i : i + len(sizes)])]
            if len(starts) == 1:
                yield from (axes_of(results[0])[starts[0] + i] for i in places)
                return
        if len(results) > 1 and len(sizes) == len(results) and isinstance(whole := arguments[0], Tensor):
            for dim, length in enumerate(whole.shape):
                if length == sum(sizes) and [tensor.shape[dim] for tensor in results] == sizes:
                    yield from (axes_of(results[i])[dim] for i in places)
                    return


def _fit(sizes: Sequence[int], shape: Sequence[int]) -> bool:
    return all(size in (-1, length) for size, length in zip(sizes, shape, strict=True))
