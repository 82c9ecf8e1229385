"""Counts what a model computes, in a forward pass of its own."""

import copy
from contextlib import suppress
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fl.base.torch_private import storage_of
from fl.data import Dataset
from fl.data.inputs import Inputs, leaves, map_inputs
from fl.engine.job import Job
from surgery.errors import SurgeryError
from surgery.forward import ghost_of
from surgery.states import owners
from surgery.torch_private import Watch


def flops(model: nn.Module, data: Dataset) -> int:
    """Count the floating-point operations of a sample's forward pass.

    They are twice its multiply-accumulates.

    Each model is counted once: one that is changed afterwards is not counted again. 0 if it cannot run on the meta
    device, because its operations depend on the data.

    >>> from fl.data import load
    >>> flops(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), load("digits"))
    1280
    """
    return _counts(model, data).flops


def activation_bytes(model: nn.Module, data: Dataset) -> int:
    """Count the bytes that a training step keeps of one sample; 0 if unknown.

    They are about what the layers give.

    Each model is counted once, as by `flops`.

    >>> from fl.data import load
    >>> activation_bytes(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), load("digits"))  # the flat image is a view
    40
    """
    return _counts(model, data).activation_bytes


def work_of(job: Job) -> int:
    """Count the operations of a batch's forward pass, per layer; 0 if unknown.

    Clients side by side pay off where single operations are too small to keep the device busy.
    """
    layers = max(1, len(list(owners(job.model))))
    return flops(job.model, job.data) // layers * job.batches.size


class _FlopCounts(NamedTuple):
    """Of one sample."""

    flops: int
    activation_bytes: int


_REFUSALS = (SurgeryError, RuntimeError, ValueError, AssertionError, TypeError)  # of a copy, or of a forward pass
_KNOWN: WeakKeyDictionary[nn.Module, dict[object, _FlopCounts]] = WeakKeyDictionary()
_PLAIN = {
    "convolution", "mm", "addmm", "bmm", "native_batch_norm", "native_group_norm", "native_layer_norm", "relu", "relu_",
    "hardtanh", "hardtanh_", "silu", "silu_", "gelu", "sigmoid", "tanh", "add", "add_", "mul", "mul_", "mean", "sum",
    "cat", "max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d", "constant_pad_nd", "empty", "view",
    "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "squeeze", "unsqueeze", "clone", "detach",
    "alias",
}  # fmt: skip
"""Operations that are the same ones on a CPU as on the meta device, and draw nothing."""
# Parameters: a copy of a model with fewer, and a forward pass, take less time than what the meta device imports.
_SMALL = 5_000_000


def _counts(model: nn.Module, data: Dataset) -> _FlopCounts:
    """Return a model's counts, from one pass of two samples; kept by shape and dtype."""
    known = _KNOWN.setdefault(model, {})
    sample, dtype = str(data.shape), next(p.dtype for p in model.parameters())
    if (sample, dtype) not in known:
        known[sample, dtype] = _FlopCounts(0, 0)
        # `deepcopy` leaves tensors that are plain attributes where they are, so that the model can read their numbers.
        ghosts = [ghost_of, lambda full: copy.deepcopy(full).to("meta")]
        # On the meta device torch works out shapes in Python, with modules of torch.compile: seconds to import.
        if _is_plain(model):
            ghosts.insert(0, copy.deepcopy)
        for ghost in ghosts:
            with suppress(*_REFUSALS):
                shadow = ghost(model)
                device = next(shadow.parameters()).device
                # of two samples, since static batch norms refuse one image
                two = map_inputs(lambda image: image.new_zeros(2, *image.shape[1:], device=device), data.x)  # noqa: B023
                known[sample, dtype] = _count(shadow, data.normalise(two, dtype))
                break
    return known[sample, dtype]


def _is_plain(model: nn.Module) -> bool:
    """Return whether a forward pass on the CPU is cheap, and notes and draws nothing."""
    parameters = list(model.parameters())
    ours = {type(module).__module__.partition(".")[0] for module in model.modules()} <= {"torch", "zoo"}
    return ours and {p.device.type for p in parameters} == {"cpu"} and sum(p.numel() for p in parameters) < _SMALL


class _Flops(Watch):
    """A counter of floating-point operations like torch's `FlopCounterMode`.

    That one imports modules of torch.compile. As all `Operations` this one keeps the shapes of operations on the meta
    device, which repeated blocks need again.

    Raises:
        RuntimeError: on a CPU, before any operation that is not in `_PLAIN`: others may have faster kernels there that
            have no formula (attention, recurrent layers), depend on the data, or be random.
    """

    def __init__(self, on_meta: bool) -> None:
        from torch.utils.flop_counter import flop_registry  # imports triton

        super().__init__()
        self.on_meta, self.formulas, self.total = on_meta, flop_registry, 0

    def before(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if not self.on_meta and operation._overloadpacket.__name__ not in _PLAIN:
            raise RuntimeError(f"{operation} has to be counted on the meta device")

    def after(self, operation: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        if formula := self.formulas.get(operation._overloadpacket):
            self.total += formula(*args, **kwargs, out_val=result)


def _count(shadow: nn.Module, two: Inputs) -> _FlopCounts:
    made_by_layers: dict[object, torch.UntypedStorage] = {}

    def note(module: nn.Module, inputs: tuple, output: object) -> None:
        if not isinstance(output, torch.Tensor):
            return
        # A view of its input, or the input changed in place, takes no memory.
        if storage_of(output) not in [storage_of(x) for x in inputs if isinstance(x, torch.Tensor)]:
            made_by_layers[storage_of(output)] = output.untyped_storage()

    # The counter follows gradients, which views of trainable parameters lack in a pass without any.
    for module in shadow.eval().requires_grad_(False).modules():
        if not any(module.children()):
            module.register_forward_hook(note)
    with torch.no_grad(), _Flops(leaves(two)[0].is_meta) as counter:
        shadow(two)
    size = sum(storage.nbytes() for storage in made_by_layers.values())
    return _FlopCounts(counter.total // 2, size // 2)


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
        """Return the operations since the last reading, and begin again at 0."""
        flops, self.flops, self.metrics = self.flops, 0, {}
        return flops
