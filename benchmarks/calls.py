"""Calling a model with any kind of example."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def outputs(model: nn.Module, example: Any) -> list[Tensor]:
    """The tensors that a model returns, without gradients."""
    with torch.no_grad():
        return tensors(call(model, example))


def call(model: nn.Module, example: Any) -> Any:
    """What a model makes of an example."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def tensors(tree: Any) -> list[Tensor]:
    """The tensors in nested lists, tuples and mappings."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    return [t for item in tree for t in tensors(item)] if isinstance(tree, list | tuple) else []
