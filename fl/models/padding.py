"""Masks of padding in models of transformers, which vmap cannot look into."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Padded(TorchFunctionMode):
    """Keep the block from learning that a mask of padding hides nothing.

    The library leaves such a mask out, which changes no result; but vmap cannot ask about several clients at once.
    """

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is Tensor.all and len(args) == 1 and not kwargs and args[0].shape == self.shape:
            return False
        return function(*args, **(kwargs or {}))


def keep_mask(model: nn.Module) -> None:
    """Let a model that gets an `attention_mask` by keyword work as within `Padded`."""
    model.register_forward_pre_hook(_enter, with_kwargs=True)
    model.register_forward_hook(_leave, always_call=True)


def _enter(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    mask = kwargs.get("attention_mask")
    Padded(torch.Size() if mask is None else mask.shape).__enter__()


def _leave(model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    Padded(torch.Size()).__exit__(None, None, None)  # leaves the one that was entered last, whichever object asks
