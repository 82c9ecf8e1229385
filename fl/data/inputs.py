"""What a model is given of samples: one tensor, or several by name, and what has to know which of the two it is."""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from torch import Tensor

Inputs: TypeAlias = Any
"""Of N samples: a tensor [N, ...], or a dict of such tensors, whose model takes them by keyword."""


def map_inputs(function: Callable[..., Any], inputs: Inputs, *others: Inputs) -> Inputs:
    """Apply a function to every tensor of inputs, with those of the same name in others.

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


def split_inputs(inputs: Inputs, size: int) -> Iterator[Inputs]:
    """Yield views of so many samples at a time, as `Tensor.split` gives them.

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
        return " and ".join(f"{name} {write_shape(one)}" for name, one in shape.items())
    return "x".join(map(str, shape)) or "a number"
