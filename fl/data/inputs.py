"""Inputs of a model: one tensor, or several by name, and functions for both."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from torch import Tensor

from fl.base.errors import FLError

Inputs: TypeAlias = Any
"""Of N samples: a tensor [N, ...], or a dict of such tensors, whose model takes them by keyword."""


def map_inputs(function: Callable[..., Any], inputs: Inputs, *others: Inputs) -> Inputs:
    """Apply a function to every tensor of inputs, with the same tensors in others.

    >>> import torch
    >>> map_inputs(torch.add, {"a": torch.ones(1), "b": torch.ones(1)}, {"b": torch.ones(1), "a": torch.zeros(1)})
    {'a': tensor([1.]), 'b': tensor([2.])}
    """
    if isinstance(inputs, dict):
        return {name: function(values, *(other[name] for other in others)) for name, values in inputs.items()}
    return function(inputs, *others)


def leaves(inputs: Inputs) -> list[Tensor]:
    """List the tensors of inputs."""
    return [*inputs.values()] if isinstance(inputs, dict) else [inputs]


def named_leaves(name: str, inputs: Inputs) -> dict[str, Tensor]:
    """Name the tensors of inputs as one writes them in Python, in alphabetical order.

    >>> import torch
    >>> list(named_leaves("x", torch.zeros(1))), list(named_leaves("x", {"b": torch.zeros(1), "a": torch.zeros(1)}))
    (['x'], ["x['a']", "x['b']"])
    """
    return {f"{name}[{key!r}]": inputs[key] for key in sorted(inputs)} if isinstance(inputs, dict) else {name: inputs}


def pad(sequences: Sequence[Any], value: float = 0) -> dict[str, np.ndarray]:
    """Pad sequences of unequal length to the longest, and say where they end.

    Returns {"x": [N, T, ...], "mask": [N, T]}. The mask is True for what was there. As samples of
    `fl.Dataset.from_arrays` a model gets both by keyword, `model(x=..., mask=...)`. Sets are sequences whose order says
    nothing. Other axes are padded alike: of graphs, pad the nodes [n, F] and the adjacency matrices [n, n], whose "x"
    is [N, n, n]. Pad training and test data together, so that both have one shape.

    Args:
        sequences: arrays of as many axes each, [T, ...]; T is at least 1.
        value: what is put behind them.

    Raises:
        FLError: for sequences that are empty, have no or other axes, or differ in features.

    >>> pad([[1, 2, 3], [4]])
    {'x': array([[1, 2, 3],
           [4, 0, 0]]), 'mask': array([[ True,  True,  True],
           [ True, False, False]])}
    """
    arrays = [np.asarray(array) for array in sequences]
    if not arrays:
        raise FLError("there are no sequences to pad: give one or more", code="data")
    for k, array in enumerate(arrays):
        if array.ndim != arrays[0].ndim or not array.ndim:
            raise FLError(f"sequence {k} has the shape {list(array.shape)}, and sequence 0 {list(arrays[0].shape)}: "
                          "give all as many axes, one or more", code="data")  # fmt: skip
        if not array.size or array.dtype.kind not in "buif":
            raise FLError(
                f"sequence {k} is {array.dtype} {list(array.shape)}: give numbers, and leave empty ones out",
                code="data",
            )
    shape = np.max([array.shape for array in arrays], axis=0)
    for axis in range(1, len(shape)):
        if any(array.shape[axis] != shape[axis] for array in arrays):
            for k, array in enumerate(arrays):  # a sequence with a feature missing is no graph
                if array.shape[axis] != len(array):
                    raise FLError(
                        f"sequence {k} has the shape {list(array.shape)}, and others end elsewhere on axis {axis}: "
                        "give all as many features, or [n, n], such as adjacency matrices",
                        code="data",
                    )
    x = np.full((len(arrays), *shape), value, np.result_type(*{array.dtype for array in arrays}))
    for place, array in zip(x, arrays):
        place[tuple(map(slice, array.shape))] = array
    return {"x": x, "mask": np.arange(shape[0]) < np.array([[len(array)] for array in arrays])}


def split_inputs(inputs: Inputs, size: int) -> Iterator[Inputs]:
    """Yield views of a number of samples at a time, as `Tensor.split` gives them.

    >>> import torch
    >>> [map_inputs(len, some) for some in split_inputs({"a": torch.zeros(3, 2)}, 2)]
    [{'a': 2}, {'a': 1}]
    """
    if isinstance(inputs, Tensor):
        yield from inputs.split(size)
    else:
        yield from (dict(zip(inputs, some)) for some in zip(*(values.split(size) for values in inputs.values())))


def write_shape(shape: Any) -> str:
    """Write the shape of a sample, which is one, or a dict of them.

    >>> write_shape((3, 8, 8)), write_shape(()), write_shape({"image": (1, 8, 8), "table": (5,)})
    ('3x8x8', 'a number', 'image 1x8x8 and table 5')
    """
    if isinstance(shape, dict):
        return " and ".join(f"{name} {write_shape(part)}" for name, part in shape.items())
    return "x".join(map(str, shape)) or "a number"
