"""Check, step by step, that a wide model computes the same as the narrow one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import explain, is_out_of_memory
from surgery.forward import call, copy_tensors, in_mode, in_precision, tensors_in, watching
from surgery.states import as_real, state
from surgery.width.plan import repeat
from surgery.width.replay import Replay, of_weights, same
from surgery.width.rules.registry import RULES
from surgery.width.solve import Choice, Solution
from surgery.width.steps import Step


def trial(model: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Return a copy in a precision, in evaluation mode, with noise on its weights.

    Without noise, weights that are 0 would hide differences.
    """
    twin, generator = clone(model).eval(), torch.Generator().manual_seed(0)
    twin._apply(lambda tensor: tensor.to(in_precision(tensor.dtype, dtype)))
    for name, tensor in state(twin).items():
        tensor = as_real(tensor)
        if tensor.is_floating_point() and "running_" not in name:
            size = tensor.abs().mean().nan_to_num().clamp(min=0.02).item()
            noise = torch.empty(tensor.shape).uniform_(-1, 1, generator=generator)
            tensor.add_(noise.to(tensor.device), alpha=0.17 * size)  # 0.1 * size is its standard deviation
    return twin


def find_change(model: nn.Module, wide: nn.Module, solution: Solution, choice: Choice, example: Any) -> int | None:
    """Return the wide model's first step with a wrong result; None if all are right.

    A result is right if it equals the model's result with positions repeated. A sum over repeated positions may differ,
    since the code may divide it by their number. So a wrong sum counts only if a later result is wrong, too.
    """
    keep = _KeepReplay(solution)
    model = clone(model)  # a forward pass may leave something in it, such as the state of a recurrence
    with explain(f"{type(model).__name__} does not run again"), in_mode(model, training=False), watching(model), keep:
        before = tensors_in(call(model, copy_tensors(example)))
    compare = _Compare(keep.kept, solution, choice)
    try:
        with in_mode(wide, training=False), watching(wide), compare:
            after = tensors_in(call(wide, copy_tensors(example)))
    except Exception as error:  # a result differs, or the model does not run
        if is_out_of_memory(error):
            raise
        return compare.done if compare.summed is None else compare.summed
    alike = all(same(repeat(old, axes, choice), new) for old, axes, new in zip(before, solution.outputs[0], after))
    return None if alike else compare.summed


class _Differs(Exception):
    """A step of the wide model has a wrong result."""


class _KeepReplay(Replay):
    """Keeps the results of all steps."""

    def __init__(self, solution: Solution):
        super().__init__(solution)
        self.kept: list[list[Tensor]] = []

    def returns(self, name: str, tensors: list[Tensor]) -> None:
        self.kept.append([tensor.detach().clone() for tensor in tensors])


_UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
"""Operations whose results hold whatever was in that memory."""


def find_unwritten(steps: Sequence[Step]) -> list[bool]:
    """Return for each step whether its result is uninitialised memory.

    A view of such memory counts, even once it is written.
    """
    flags: list[bool] = []
    for step in steps:
        rule = RULES.get(step.name)
        source = step.sources[0] if len(step.sources) == 1 and rule and rule.carries else None
        view = source is not None and not isinstance(source[0], str) and flags[source[0]]
        flags.append(view or step.name in _UNWRITTEN)
    return flags


_SUMS = {"sum", "nansum", "norm", "linalg_vector_norm"}


class _Compare(Replay):
    """Compares results with earlier ones, but for weights and uninitialised memory."""

    def __init__(self, results: list[list[Tensor]], solution: Solution, choice: Choice):
        super().__init__(solution)
        self.kept, self.solution, self.choice = results, solution, choice
        self.summed: int | None = None  # the first sum that differs
        self.no_numbers = [any(pair) for pair in zip(of_weights(self.steps), find_unwritten(self.steps))]

    def returns(self, name: str, tensors: list[Tensor]) -> None:
        step, before = self.steps[self.done], self.kept[self.done]
        if step.name != name or not all(
            same(repeat(old, axes, self.choice), new)
            for old, axes, new in zip(before, step.outputs, tensors)
            if not self.no_numbers[self.done]
            and [axis.size for axis in axes] == list(old.shape)  # some kernels leave statistics empty
        ):
            if name not in _SUMS:
                raise _Differs
            self.summed = self.done if self.summed is None else self.summed
        self.kept[self.done] = []
