"""How much a model computes, counted where nothing is computed (the meta device)."""

import copy
from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fl.base.torch_private import storage_of
from fl.data import Dataset
from fl.engine.job import Job
from surgery.states import owners


def flops(model: nn.Module, data: Dataset) -> int:
    """Count the floating-point operations of one sample's forward pass: twice its multiply-accumulates.

    Each model is counted once. 0 if the model cannot run on the meta device, because its operations depend on the data.

    >>> from fl.data import load
    >>> flops(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), load("digits"))
    1280
    """
    sample = data.x.shape[1:]
    known = _FLOPS.setdefault(model, {})
    if sample not in known:
        with FlopCounterMode(display=False) as counter:
            ran = _pretended(model, data)
        known[sample] = counter.get_total_flops() // 2 if ran else 0
    return known[sample]


_FLOPS: WeakKeyDictionary[nn.Module, dict[torch.Size, int]] = WeakKeyDictionary()


def work(job: Job) -> int:
    """Count the operations of one forward pass of one client's batch, per layer of the network; 0 if unknown.

    Clients side by side pay off where single operations are too small to keep the device busy.
    """
    layers = max(1, len(list(owners(job.model))))
    return flops(job.model, job.data) // layers * job.batches.size


def activation_bytes(model: nn.Module, data: Dataset) -> int:
    """Count the bytes that a training step keeps of one sample: about what the layers give; 0 if unknown.

    >>> from fl.data import load
    >>> activation_bytes(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), load("digits"))  # the flat image is a view
    40
    """
    seen: dict[object, torch.UntypedStorage] = {}

    def note(module: nn.Module, given: tuple, made: object) -> None:
        if not isinstance(made, torch.Tensor):
            return
        # A view of its input, or the input changed in place, takes no memory.
        if storage_of(made) not in [storage_of(x) for x in given if isinstance(x, torch.Tensor)]:
            seen[storage_of(made)] = made.untyped_storage()

    return sum(storage.nbytes() for storage in seen.values()) // 2 if _pretended(model, data, note) else 0


def _pretended(model: nn.Module, data: Dataset, note: Callable | None = None) -> bool:
    """Let a copy of the model run for two samples on the meta device; returns whether that is possible.

    Args:
        note: a forward hook for the modules without children.
    """
    try:
        shadow = copy.deepcopy(model).to("meta").eval().requires_grad_(False)
    except RuntimeError:  # a model with the older weight_norm cannot be copied
        return False
    for module in shadow.modules() if note else ():
        if not any(module.children()):
            module.register_forward_hook(note)
    dtype = next(p.dtype for p in shadow.parameters())
    two = torch.zeros(2, *data.x.shape[1:], device="meta", dtype=data.x.dtype)  # static batch norms refuse one image
    try:
        with torch.no_grad():
            shadow(data.normalise(two, dtype))
    except (RuntimeError, ValueError, AssertionError, TypeError):
        return False
    return True


class Meter:
    """Adds up what clients compute, until it is read.

    Attributes:
        flops: of forward passes in local training; a training step costs about three of them.
        seconds: of simulated time, of whoever took longest (`fl.federation.pace`).
    """

    def __init__(self) -> None:
        self.flops, self.seconds = 0, 0.0

    def read(self) -> int:
        """Return the operations since the last reading, and begin anew."""
        flops, self.flops, self.seconds = self.flops, 0, 0.0
        return flops
