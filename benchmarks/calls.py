"""Calling a model with any kind of example."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


def outputs(model: nn.Module, example: Any, output: Callable[[Any], Any] | None = None) -> list[Tensor]:
    """Return the tensors in a model's output, without gradients."""
    with torch.no_grad():
        found = call(model, example)
    return tensors(found if output is None else output(found))


def call(model: nn.Module, example: Any) -> Any:
    """Return a model's output for an example."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def tensors(tree: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and mappings."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    return [t for item in tree for t in tensors(item)] if isinstance(tree, list | tuple) else []
