"""How much a model computes, counted where nothing is computed (the meta device)."""

import copy
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fl.data import Dataset


def flops(model: nn.Module, data: Dataset) -> int:
    """Floating-point operations of one sample's forward pass: twice its multiply-accumulates. Each model is counted
    once.

    0 if the model cannot run on the meta device, because its operations depend on the data.

    >>> from fl.data import load
    >>> flops(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), load("digits"))
    1280
    """
    sample = data.x.shape[1:]
    known = _FLOPS.setdefault(model, {})
    if sample not in known:
        known[sample] = _count(model, data)
    return known[sample]


_FLOPS: WeakKeyDictionary[nn.Module, dict[torch.Size, int]] = WeakKeyDictionary()


def _count(model: nn.Module, data: Dataset) -> int:
    try:
        shadow = copy.deepcopy(model).to("meta").eval().requires_grad_(False)
    except RuntimeError:  # a model with the older weight_norm cannot be copied
        return 0
    dtype = next(p.dtype for p in shadow.parameters())
    two = torch.zeros(2, *data.x.shape[1:], device="meta", dtype=data.x.dtype)  # static batch norms refuse one image
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            shadow(data.normalise(two, dtype))
    except (RuntimeError, ValueError, AssertionError, TypeError):
        return 0
    return counter.get_total_flops() // 2


class Meter:
    """Adds up what clients compute, until it is read.

    Attributes:
        flops: of forward passes in local training; a training step costs about three of them.
    """

    def __init__(self) -> None:
        self.flops = 0

    def read(self) -> int:
        """What was added since the last reading."""
        flops, self.flops = self.flops, 0
        return flops
