"""Makes a narrow module run: attributes that store widths are set right until every operation is as predicted."""

from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from surgery import attributes
from surgery.axes import Axis, find, is_fixed, new_size, unify
from surgery.edits import set_attribute
from surgery.rules import LAYOUT
from surgery.submodel import Submodel
from surgery.trace import Trace, evaluating, operation_name, run, tensors_in, watching

_ATTEMPTS = 200


def couple(trace: Trace, step: int, keep) -> bool:
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


class _Diverged(Exception):
    """The narrow model does something else than predicted, at this step."""

    def __init__(self, step: int, message: str):
        super().__init__(message)
        self.step = step


class Stuck(Exception):
    """No choice of attributes makes the narrow model run beyond this step."""

    def __init__(self, step: int, message: str):
        super().__init__(message)
        self.step, self.message = step, message


def repaired(model, plan: Submodel, trace: Trace, keep, example) -> Submodel:
    """The plan with the edits that set attributes right, found by running it and mending the first difference."""
    sizes = attributes.sizes_by_module(trace, keep)
    numbers = {step.module: {old: new_size(axis, keep) for old, axis in step.numbers.items()} for step in trace.steps}
    known = tuple(attributes.known_edits(plan.build(model), numbers))
    base = plan.edits + known
    chosen: dict[tuple[str, str], Any] = {}
    for name, module in model.named_modules():
        for attribute, value in attributes.candidates(module, _subtree(sizes, name), sure=True).items():
            chosen[name, attribute] = value

    small = Submodel(plan.entries, plan.shapes, base).build(model)

    def attempt(edits: dict[tuple[str, str], Any]) -> tuple[int, str]:
        modules = {name: small.get_submodule(name) for name, _ in edits}
        before = {(name, attribute): getattr(modules[name], attribute) for name, attribute in edits}
        try:
            for (name, attribute), value in edits.items():
                set_attribute(small, name, attribute, value)
            _compare(small, trace, keep, example)
        except _Diverged as difference:
            return difference.step, str(difference)
        finally:
            for (name, attribute), value in before.items():
                setattr(modules[name], attribute, value)
        return len(trace.steps), ""

    reached, message = attempt(chosen)
    attempts = 1
    while reached < len(trace.steps):
        for option in _options(model, trace.steps[reached], keep, chosen):
            attempts += 1
            result = attempt(option)
            if result[0] > reached or attempts > _ATTEMPTS:
                break
        else:
            result = (reached, message)
        if result[0] <= reached:
            step = trace.steps[reached]
            raise Stuck(
                reached,
                f"{type(model).__name__} does not run with narrow widths: in {step.module or 'the model itself'} "
                f"({step.name}): {message}. A width may be "
                "kept in a constant that surgery cannot see: make it an attribute or read it from a shape",
            )
        chosen = option
        reached, message = result
    sets = [{"do": "set", "module": m, "attribute": a, "value": v} for (m, a), v in chosen.items()]
    return Submodel(plan.entries, plan.shapes, (*base, *sets))


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
