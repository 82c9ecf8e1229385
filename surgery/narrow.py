"""Contiguous width slicing: a narrower network that keeps the first positions of every hidden width."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from surgery import attributes
from surgery.axes import Axis, atoms, find, is_fixed, new_size, positions, unify
from surgery.errors import SurgeryError
from surgery.rules import LAYOUT
from surgery.state import owners, state
from surgery.submodel import Index, Source, Submodel, as_runs
from surgery.trace import Trace, evaluating, operation_name, run, tensors_in, watching
from surgery.widths import Rounding, choose

_ATTEMPTS = 200


def narrow(
    model: nn.Module,
    rate: float,
    example: Any,
    *,
    heads: str = "inside",
    rounding: Rounding = math.ceil,
) -> tuple[nn.Module, Submodel]:
    """A narrower copy of any module: the first ceil(rate * C) positions of every hidden width C.

    One forward pass in evaluation mode shows which axes of which tensors are one width; another compares every operation of the narrow
    model with what the algebra of axes predicts, so that what is returned is never a wrong model.

    Args:
        model: any module; it is not changed.
        rate: in (0, 1].
        example: an input: a tensor, a tuple of arguments or a dict of keyword arguments. Its axes, and those of the
            output (classes), stay.
        heads: `inside` keeps all heads of an attention and slices inside of each; `drop` keeps the first heads.
        rounding: from rate * C to the number of positions kept, which is at least one.

    Returns:
        The narrow module, and the plan that maps its state to the model's.

    Raises:
        SurgeryError: where a width cannot be followed or the model cannot be made to run with it.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 5))
    >>> small, plan = narrow(net, 0.5, torch.zeros(2, 3, 4, 4))
    >>> small[0], small[3]
    (Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1)), Linear(in_features=16, out_features=5, bias=True))
    >>> torch.equal(plan.extract(state(net))["0.weight"], net[0].weight[:4])
    True
    """
    if not 0 < rate <= 1:
        raise SurgeryError(f"rate is a share of the width in (0, 1], got {rate}")
    if heads not in ("inside", "drop"):
        raise SurgeryError(f"unknown heads={heads!r}: choose inside or drop")
    values = state(model)
    with evaluating(model):
        trace = Trace(model, example, lambda: run(model, example))
    keep = choose(trace, rate, heads, rounding)
    _check_followed(trace, model)
    for _ in range(_ATTEMPTS):
        try:
            return _repaired(model, _plan(model, values, trace, keep), trace, keep, example)
        except _Stuck as stuck:
            # Code may take one width for another of the same size (a head's share from its input's channels).
            if not _couple(trace, stuck.step, keep):
                raise SurgeryError(stuck.message) from None
            keep = choose(trace, rate, heads, rounding)
    raise AssertionError("coupling ends because every round leaves fewer axes apart")


def _plan(model: nn.Module, values, trace: Trace, keep) -> Submodel:
    """Where the kept positions of every tensor lie, and edits that slice the tensors that no state holds."""
    held = {id(tensor): name for _, _, own in owners(model) for name, tensor in own.items()}
    entries, slices = {}, []
    for name, module in model.named_modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, torch.Tensor)}
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items(), *plain.items()):
            if tensor is None:
                continue
            where = tuple(_runs(axis, keep) for axis in trace.axes_of(tensor))
            if id(tensor) in held:
                key = held[id(tensor)]
                entries[key] = (Source(key, where),)
            elif any(runs is not None for runs in where):
                slices.append({"do": "slice", "module": name, "attribute": attribute, "index": where})
    shapes = {name: tuple(tensor.shape) for name, tensor in values.items()}
    return Submodel({name: entries[name] for name in values}, shapes, tuple(slices))


def _couple(trace: Trace, step: int, keep) -> bool:
    """Axes of one size that one module sees become the same, where they would get different widths."""
    module = trace.steps[step].module
    found: dict[int, list[Axis]] = {}
    for other in trace.steps:
        if other.module == module or other.module.startswith(f"{module}."):
            for axis in (axis for tensor in (*other.inputs, *other.outputs) for axis in tensor):
                found.setdefault(axis.size, []).append(axis)
    changed = False
    for same in found.values():
        free = [axis for axis in same if not is_fixed(axis)]
        for axis in free[1:]:
            if new_size(axis, keep) != new_size(free[0], keep) and find(axis) is not find(free[0]):
                unify(free[0], axis)
                changed = True
    return changed


def _runs(axis, keep) -> Index | None:
    kept = new_size(axis, keep)
    return None if kept == axis.size else as_runs(positions(axis, keep))


def _check_followed(trace: Trace, model: nn.Module) -> None:
    """Every axis that a layer makes could be followed."""
    for (module, attribute), found in trace.tensors.items():
        for i, axis in enumerate(found):
            for atom in atoms(axis):
                if atom.fixed.startswith("cannot"):
                    raise SurgeryError(
                        f"axis {i} of {module + '.' if module else ''}{attribute} {tuple(a.size for a in found)} "
                        f"{atom.fixed}: narrow the parts around it, or give surgery.rules a rule for it"
                    )


class _Diverged(Exception):
    """The narrow model does something else than predicted, at this step."""

    def __init__(self, step: int, message: str):
        super().__init__(message)
        self.step = step


class _Stuck(Exception):
    """No choice of attributes makes the narrow model run beyond this step."""

    def __init__(self, step: int, message: str):
        super().__init__(message)
        self.step, self.message = step, message


def _repaired(model, plan: Submodel, trace: Trace, keep, example) -> tuple[nn.Module, Submodel]:
    """The narrow module with its attributes set right, found by running it and mending the first difference."""
    sizes = attributes.sizes_by_module(trace, keep)
    numbers = {step.module: {old: new_size(axis, keep) for old, axis in step.numbers.items()} for step in trace.steps}
    known = tuple(attributes.known_edits(plan.build(model), numbers))
    base = plan.edits + known
    chosen: dict[tuple[str, str], Any] = {}
    for name, module in model.named_modules():
        for attribute, value in attributes.candidates(module, _subtree(sizes, name), sure=True).items():
            chosen[name, attribute] = value

    def attempt(edits: dict[tuple[str, str], Any]) -> tuple[int, str, nn.Module, Submodel]:
        sets = [{"do": "set", "module": m, "attribute": a, "value": v} for (m, a), v in edits.items()]
        tried = Submodel(plan.entries, plan.shapes, (*base, *sets))
        small = tried.build(model)
        try:
            _compare(small, trace, keep, example)
        except _Diverged as difference:
            return difference.step, str(difference), small, tried
        return len(trace.steps), "", small, tried

    reached, message, small, tried = attempt(chosen)
    attempts = 1
    while reached < len(trace.steps):
        for option in _options(model, trace.steps[reached], keep, chosen):
            attempts += 1
            result = attempt(option)
            if result[0] > reached or attempts > _ATTEMPTS:
                break
        else:
            result = (reached,)
        if result[0] <= reached:
            step = trace.steps[reached]
            raise _Stuck(
                reached,
                f"{type(model).__name__} does not run with narrow widths: in {step.module or 'the model itself'} ({step.name}): {message}. A width may be "
                "kept in a constant that surgery cannot see: make it an attribute or read it from a shape",
            )
        chosen = option
        reached, message, small, tried = result
    return small, tried


def _subtree(sizes, name: str):
    """The sizes of a module and of the modules inside of it."""
    found: attributes.Sizes = {}
    prefix = f"{name}." if name else ""
    for other, values in sizes.items():
        if other == name or other.startswith(prefix):
            attributes._merge(found, values)
    return found


def _options(model, step, keep, chosen) -> Iterator[dict[tuple[str, str], Any]]:
    """Other choices of attributes that may mend a step: of its own module, then of those around it."""
    seen = attributes.step_sizes(step, keep)
    name = step.module
    while True:
        module = model.get_submodule(name)
        found = attributes.candidates(module, seen, sure=False)
        new = {(name, a): v for a, v in found.items() if chosen.get((name, a)) != v}
        if new:
            yield chosen | new
        for key in new:
            if len(new) > 1:
                yield chosen | {key: new[key]}
        mine = [key for key in chosen if key[0] == name]
        for key in mine:
            yield {k: v for k, v in chosen.items() if k != key}
        if mine:
            yield {k: v for k, v in chosen.items() if k not in mine}
        if not name:
            return
        name = name.rpartition(".")[0]


class _Predicted(TorchDispatchMode):
    """Compares the operations of the narrow model with the steps of the full one, as they happen."""

    def __init__(self, trace: Trace, keep):
        super().__init__()
        self.trace, self.keep, self.done = trace, keep, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = operation_name(func)
        if name in LAYOUT:
            return result
        if self.done >= len(self.trace.steps):
            raise _Diverged(self.done - 1, f"the narrow model goes on with {name}")
        step = self.trace.steps[self.done]
        if step.name != name:
            raise _Diverged(self.done, f"{name} instead of {step.name}")
        for found, tensor in zip(step.outputs, tensors_in(result)):
            expected = tuple(new_size(axis, self.keep) for axis in found)
            if expected != tuple(tensor.shape):
                raise _Diverged(
                    self.done, f"a result of shape {list(tensor.shape)} where {list(expected)} was expected"
                )
        self.done += 1
        return result


def _compare(small: nn.Module, trace: Trace, keep, example) -> None:
    """Run the narrow model; raise _Diverged at the first operation that is not as predicted."""
    predicted = _Predicted(trace, keep)
    try:
        with evaluating(small), watching(small), predicted:
            output = run(small, example)
    except _Diverged:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _Diverged(min(predicted.done, len(trace.steps) - 1), lines[0]) from error
    if predicted.done != len(trace.steps):
        raise _Diverged(predicted.done, "the narrow model stops early")
    shapes = [tuple(axis.size for axis in found) for found in trace.outputs]
    if [tuple(tensor.shape) for tensor in tensors_in(output)] != shapes:
        raise _Diverged(len(trace.steps) - 1, "the output has another shape")
