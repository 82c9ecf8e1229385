"""Activation checkpointing: blocks keep their inputs alone, and are computed again in the backward pass.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), by torch.utils.checkpoint.
"""

import copy
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fl.base.errors import FLError
from fl.engine.constants import constants
from fl.engine.draws import Drawing, Draws
from surgery import sections


class Recomputed:
    """The residual blocks of a model, each of which computes its activations twice and keeps none.

    The second time a block has the parameters, buffers and random numbers of the first, so that gradients are the same
    and norms count a batch once.

    Args:
        model: it is changed: the forward of its blocks.

    Attributes:
        draws: what the step under way draws from; None: it draws nothing.

    Raises:
        FLError: for a model without blocks.
    """

    def __init__(self, model: nn.Module) -> None:
        self.draws: Draws | None = None
        self.constants = constants(model)
        found = [model.get_submodule(name) for section in sections(model) for name in section.blocks]
        if not found:
            raise FLError(
                f"--activation-checkpointing: {type(model).__name__} has no residual blocks, as surgery.sections finds "
                "them, that could be computed again: leave it out"
            )
        for block in found:  # a list of modules is not called itself
            for called in block.children() if isinstance(block, nn.ModuleList) else [block]:
                called.forward = partial(self._forward, called, called.forward)

    def _forward(self, block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [
            (holder, name, tensor.clone() if holder is module._buffers and self._may_change(tensor) else tensor)
            for module in block.modules()
            for holder in (module._parameters, module._buffers)
            for name, tensor in holder.items()
        ]
        contexts = nullcontext(), _Again(tensors, copy.copy(self.draws))
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: contexts, **kwargs
        )

    def _may_change(self, buffer: Tensor | None) -> bool:
        """Whether the forward pass may change a buffer, so that the second time needs a copy of it."""
        return buffer is not None and id(buffer) not in self.constants


class _Again:
    """Within it a block has these tensors and draws; afterwards it has its own again."""

    def __init__(self, tensors: list[tuple[dict, str, Tensor | None]], draws: Draws | None) -> None:
        self.tensors, self.draws = tensors, draws

    def __enter__(self) -> None:
        with ExitStack() as stack:
            if self.draws:
                stack.enter_context(Drawing(copy.copy(self.draws)))
            for holder, name, tensor in self.tensors:
                stack.callback(holder.__setitem__, name, holder[name])
                holder[name] = tensor
            self.stack = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self.stack.__exit__(*error)
