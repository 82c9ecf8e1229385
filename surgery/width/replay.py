"""A model run again along its trace: what products read of a batch."""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from surgery.errors import SurgeryError, explain
from surgery.forward import call, copy_tensors, in_mode, tensors_in, watching
from surgery.states import as_real
from surgery.torch_private import Watch
from surgery.width.rules.registry import is_step, operation_name
from surgery.width.solve import SUMS, Axes, Solution
from surgery.width.steps import Step

_NEAR = 1e-6  # of the largest number: rounding is far below that, another computation above


class Replay(Watch):
    """Follows a trace's steps while a model runs; `done` is the next step's number."""

    def __init__(self, solution: Solution):
        super().__init__()
        self.steps, self.done = solution.steps, 0

    def before(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if is_step(operation):
            self.takes(operation_name(operation), tensors_in((args, kwargs)))

    def after(self, operation: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        if is_step(operation):
            self.returns(operation_name(operation), tensors_in(result))
            self.done += 1

    def takes(self, name: str, tensors: list[Tensor]) -> None:
        """Note what an operation is about to take."""

    def returns(self, name: str, tensors: list[Tensor]) -> None:
        """Note what an operation has returned."""


def of_weights(steps: Sequence[Step], or_constants: bool = False) -> list[bool]:
    """Return by step whether it computes from the model's tensors, or constants."""
    flags: list[bool] = []
    for step in steps:
        alone = all(_is_of_weights(source, flags) for source in step.sources)
        flags.append(alone and (bool(step.sources) or or_constants))
    return flags


def _is_of_weights(source: Any, steps: Sequence[bool]) -> bool:
    return source is not None and (isinstance(source[0], str) or steps[source[0]])


class _Reads(Replay):
    """Shows what products read that is not computed of weights alone."""

    def __init__(self, solution: Solution, names: Collection[str], or_constants: bool, read: Callable):
        super().__init__(solution)
        self.names, self.read = names, read
        self.of_weights = of_weights(self.steps, or_constants)

    def takes(self, name: str, tensors: list[Tensor]) -> None:
        if self.done >= len(self.steps) or self.steps[self.done].name != name:
            raise SurgeryError(f"the model computes something else on a batch than on the example: {name}", code="run")
        step = self.steps[self.done]
        for which, (tensor, axes) in enumerate(zip(tensors, step.inputs) if name in self.names else ()):
            if tensor.dtype.to_real().is_floating_point and not _is_of_weights(step.sources[which], self.of_weights):
                self.read((self.done, which), tensor, axes)


def read_batch(
    model: nn.Module,
    batch: Any,
    solution: Solution,
    read: Callable[[tuple[int, int], Tensor, Axes], None],
    *,
    where: str,
    by: str,
    names: Collection[str] = SUMS,
    or_constants: bool = False,
) -> None:
    """Run a batch; call `read` with all that products read of data.

    `read` gets (step, input), the tensor and its axes.

    Args:
        where, by: what the batch is called in errors, and for what it was given.
        names: of the operations that count as products.
        or_constants: whether what is computed of constants alone does not count either.

    Raises:
        SurgeryError: if the model does not run, or computes something else than on the example.
    """
    reads, problem = _Reads(solution, names, or_constants, read), f"{type(model).__name__} does not run on {where}"
    hint = f"; by={by!r} takes batches of inputs, without labels"
    with explain(problem, hint), in_mode(model, training=False), watching(model), reads:
        call(model, copy_tensors(batch))


def same(expected: Tensor, actual: Tensor, near: float | None = None) -> bool:
    """Return whether two tensors are the same but for rounding.

    The difference is less than `near` times the largest number.
    """
    if expected.shape != actual.shape:
        return False
    if actual._is_zerotensor():  # one without memory, which must not be read
        return True
    if actual.is_complex() and expected.is_complex():
        return same(as_real(expected), as_real(actual), near)
    if not actual.is_floating_point() or not actual.numel():
        return actual.dtype != expected.dtype or bool((actual == expected).all())
    low, high = expected.aminmax()
    size = max(-low.item(), high.item())
    if not math.isfinite(size):
        size = expected.abs().nan_to_num(0, 0, 0).max().item()
    near = near or (_NEAR if actual.dtype == torch.float64 else 1e-3)
    atol = near * max(size, 1e-30)
    low, high = (actual - expected).aminmax()
    if max(-low.item(), high.item()) <= atol:  # several times as fast as `allclose`; False where there are NaNs
        return True
    return torch.allclose(expected, actual, rtol=0, atol=atol, equal_nan=True)
