"""A model to judge: how it is built, at full and at half width, and what it is called with."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """A model and its input.

    Attributes:
        build: the model, with random weights.
        example: an input for a model: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        half: the model as its own constructor makes it with half of every hidden width; None if that is not known.
        training: the input for a training step, where it is another one.
        blocks: whether it has a block that can be repeated.
        detects: whether the first axis of its outputs is a number of detections, which depends on the weights.
        output: what of the output counts, as for `surgery.narrow`; None for all of it.
    """

    build: Callable[[], nn.Module]
    example: Callable[[nn.Module], Any]
    half: Callable[[], nn.Module] | None = None
    training: Callable[[nn.Module], Any] | None = None
    blocks: bool = True
    detects: bool = False
    output: Callable[[Any], Any] | None = None

    def shapes(self, outputs: Iterable[Tensor]) -> list[torch.Size]:
        """Return the shapes that outputs of this model have whatever its weights are."""
        return [tensor.shape[1:] if self.detects else tensor.shape for tensor in outputs]


def scaled(build: Callable[[int], nn.Module], example: Callable[[], Any], blocks: bool = False) -> Case:
    """Return the case of a model with hidden widths that are multiples of a scale: 2 for the full model, 1 for half."""
    return Case(lambda: build(2), lambda model: example(), lambda: build(1), blocks=blocks)
