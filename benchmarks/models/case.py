"""A model to judge: how it is built, at full and at half width, and what it is called with."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Case:
    """A model and its input.

    Attributes:
        build: the model, with random weights.
        example: an input for a model: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        half: the model as its own constructor makes it with half of every hidden width; None if that is not known.
        training: the input for a training step, where it is another one.
        blocks: whether it has a block that can be repeated.
    """

    build: Callable[[], nn.Module]
    example: Callable[[nn.Module], Any]
    half: Callable[[], nn.Module] | None = None
    training: Callable[[nn.Module], Any] | None = None
    blocks: bool = True


def scaled(build: Callable[[int], nn.Module], example: Callable[[], Any], blocks: bool = False) -> Case:
    """The case of a model whose hidden widths are multiples of a scale: 2 for the full model, 1 for half of it."""
    return Case(lambda: build(2), lambda model: example(), lambda: build(1), blocks=blocks)
