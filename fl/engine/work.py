"""How much a model computes, counted where nothing is computed (the meta device)."""

import copy
from contextlib import suppress
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fl.base.torch_private import storage_of
from fl.data import Dataset
from fl.data.inputs import Inputs, map_inputs
from fl.engine.job import Job
from surgery.errors import SurgeryError
from surgery.forward import ghost_of
from surgery.states import owners
from surgery.torch_private import Operations


def flops(model: nn.Module, data: Dataset) -> int:
    """Count the floating-point operations of one sample's forward pass: twice its multiply-accumulates.

    Each model is counted once: one that is changed afterwards is not counted again. 0 if it cannot run on the meta
    device, because its operations depend on the data.

    >>> from fl.data import load
    >>> flops(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), load("digits"))
    1280
    """
    return _counts(model, data).flops


def activation_bytes(model: nn.Module, data: Dataset) -> int:
    """Count the bytes that a training step keeps of one sample: about what the layers give; 0 if unknown.

    Each model is counted once, as by `flops`.

    >>> from fl.data import load
    >>> activation_bytes(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), load("digits"))  # the flat image is a view
    40
    """
    return _counts(model, data).activation_bytes


def work(job: Job) -> int:
    """Count the operations of one forward pass of one client's batch, per layer of the network; 0 if unknown.

    Clients side by side pay off where single operations are too small to keep the device busy.
    """
    layers = max(1, len(list(owners(job.model))))
    return flops(job.model, job.data) // layers * job.batches.size


class _Counts(NamedTuple):
    """Of one sample."""

    flops: int
    activation_bytes: int


_REFUSALS = (SurgeryError, RuntimeError, ValueError, AssertionError, TypeError)  # of a copy, or of a forward pass
_KNOWN: WeakKeyDictionary[nn.Module, dict[object, _Counts]] = WeakKeyDictionary()


def _counts(model: nn.Module, data: Dataset) -> _Counts:
    """The counts of a model, from one forward pass of two samples on the meta device; kept by its shape and dtype."""
    known = _KNOWN.setdefault(model, {})
    sample, dtype = str(data.shape), next(p.dtype for p in model.parameters())
    if (sample, dtype) not in known:
        # of two samples, since static batch norms refuse one image
        two = map_inputs(lambda values: values.new_zeros(2, *values.shape[1:], device="meta"), data.x)
        known[sample, dtype] = _Counts(0, 0)
        # `deepcopy` leaves tensors that are plain attributes where they are, so that the model can read their numbers.
        for ghost in (ghost_of, lambda full: copy.deepcopy(full).to("meta")):
            with suppress(*_REFUSALS):
                known[sample, dtype] = _counted(ghost(model), data.normalise(two, dtype))
                break
    return known[sample, dtype]


def _counted(shadow: nn.Module, two: Inputs) -> _Counts:
    from torch.utils.flop_counter import FlopCounterMode  # imports triton

    made_by_layers: dict[object, torch.UntypedStorage] = {}

    def note(module: nn.Module, given: tuple, made: object) -> None:
        if not isinstance(made, torch.Tensor):
            return
        # A view of its input, or the input changed in place, takes no memory.
        if storage_of(made) not in [storage_of(x) for x in given if isinstance(x, torch.Tensor)]:
            made_by_layers[storage_of(made)] = made.untyped_storage()

    # The counter follows gradients, which views of trainable parameters lack in a pass without any.
    for module in shadow.eval().requires_grad_(False).modules():
        if not any(module.children()):
            module.register_forward_hook(note)
    # `Operations` keeps the shapes of operations, which repeated blocks need again.
    with torch.no_grad(), Operations(), FlopCounterMode(display=False) as counter:
        shadow(two)
    size = sum(storage.nbytes() for storage in made_by_layers.values())
    return _Counts(counter.get_total_flops() // 2, size // 2)


class Meter:
    """Adds up what clients compute, until it is read.

    Attributes:
        flops: of forward passes in local training; a training step costs about three of them.
        metrics: columns of metrics.csv that what wraps local training has measured.
    """

    def __init__(self) -> None:
        self.flops = 0
        self.metrics: dict[str, float] = {}

    def read(self) -> int:
        """Return the operations since the last reading, and begin anew."""
        flops, self.flops, self.metrics = self.flops, 0, {}
        return flops
