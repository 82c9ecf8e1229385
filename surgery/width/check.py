"""The check of a plan: whether the model that it makes does what was predicted.

The narrow model runs beside the full one's trace, and every operation has to be as the algebra of axes predicts.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from surgery.attention import plain_attention
from surgery.copying import clone
from surgery.errors import first_line
from surgery.forward import call, copy_tensors, in_mode, named_tensors, tensors_in, watching
from surgery.hooks import followers
from surgery.names import is_inside, join
from surgery.plan import Plan
from surgery.plan.edits import apply_edit, attribute_of
from surgery.states import names_by_id
from surgery.torch_private import Operations, tree_map
from surgery.width.attributes import attribute_values
from surgery.width.axes import SHUFFLED
from surgery.width.constants import (
    SizeChanges,
    layer_edits,
    new_sizes,
    step_sizes,
    together,
)
from surgery.width.rules.registry import is_step, operation_name
from surgery.width.scales import Held, Scales, Scaling
from surgery.width.solve import SPLITS, Axes, Axis, Choice, Product, Solution, Sum, atoms, size_of
from surgery.width.steps import Step, bind, scalars_of
from surgery.width.trace import Origins
from surgery.width.wrapped import ITEM, Wrapped, Wrapping


class CheckedPlan(NamedTuple):
    """The plan of a narrow model that runs as predicted.

    Attributes:
        plan: the plan, with edits of attributes.
        unscaled: the numbers that stay although they scale sums whose lengths change.
    """

    plan: Plan
    unscaled: Sequence[Scaling]


class Divergence(NamedTuple):
    """The first step at which the narrow model does not do what was predicted.

    No values that were tried for the model's attributes let it run further.
    """

    step: int
    difference: str
    message: str


class _DivergentStep(Exception):
    """A step at which the narrow model does not do what was predicted.

    `computed`: it computes with another number.
    """

    def __init__(self, step: int, message: str, computed: bool = False):
        super().__init__(message)
        self.step, self.computed = step, computed


def check_plan(
    model: nn.Module,
    plan: Plan,
    solution: Solution,
    choice: Choice,
    example: Any,
    held: Mapping[tuple[str, str], Held] = MappingProxyType({}),
) -> CheckedPlan | Divergence:
    """Return the plan with edits of attributes, or where the narrow model diverges.

    The narrow model runs with one proposal of `attribute_values` after another, until it does what was predicted.

    Args:
        held: the numbers that tensors of one element hold, see `held_numbers`.
    """
    scales = Scales(solution, choice, held)
    scalings, by_module = list(scales.scalings()), new_sizes(solution, choice, scales)
    state_names, tensors = names_by_id(model), dict(named_tensors(model))
    in_state = {key for key, tensor in tensors.items() if id(tensor) in state_names}
    fill_values = {key: new for key, new in _find_fill_values(solution, scalings).items() if key not in in_state}
    fills = [{"do": "fill", "module": m, "attribute": a, "value": value} for (m, a), value in fill_values.items()]
    sizes = together(by_module.values()).numbers
    divergences: list[_DivergentStep] = []
    for values in attribute_values(model, solution, choice, scales, by_module):
        small = plan.build_unchecked(model)
        sets = [{"do": "set", "module": m, "attribute": a, "value": value} for (m, a), value in values.items()]
        checked = plan.with_edits((*plan.edits, *layer_edits(small, solution, choice), *sets, *fills))
        for edit in checked.edits[len(plan.edits) :]:
            apply_edit(small, edit)
        scaled = [attribute_of(model, *place) for place, value in values.items() if isinstance(value, float)]
        # Where no attribute has changed, only shapes can have changed a number of the code.
        shapes = sizes if not values and all(tensor.is_meta for tensor in tensors.values()) else {}
        narrow = _Comparison(small, solution, choice, scales, scaled, shapes)
        diverged = narrow.difference(example)
        if diverged is None:
            stay = [scaling for scaling in scalings if scaling.held or (scaling.step, scaling.value) in narrow.same]
            return CheckedPlan(checked, [scaling for scaling in stay if scaling.held not in fill_values])
        divergences.append(diverged)
    furthest = max(divergences, key=lambda error: error.step)
    return Divergence(furthest.step, str(furthest), _explain_divergence(model, solution, choice, furthest))


def _find_fill_values(solution: Solution, scalings: Sequence[Scaling]) -> dict[tuple[str, str], float]:
    """Return the new numbers of tensors, where all steps that take one agree."""
    new_values: dict[tuple[str, str], dict[int, set[float | None]]] = {}
    for scaling in scalings:
        if scaling.held is not None:
            new_values.setdefault(scaling.held, {}).setdefault(scaling.step, set()).add(scaling.new)
    fillings = {}
    for key, by_step in new_values.items():
        takers = {number for number, step in enumerate(solution.steps) if key in step.sources}
        new_numbers = set().union(*by_step.values())
        if takers == by_step.keys() and len(new_numbers) == 1 and (new := new_numbers.pop()) is not None:
            fillings[key] = new
    return fillings


def with_configuration(
    model: nn.Module, plan: Plan, solution: Solution, choice: Choice, example: Any
) -> tuple[Plan, str]:
    """Return the plan, with the new widths in the configuration, and any problem.

    The problem says why a configuration cannot express the new widths; "" if it can.
    """

    def difference(small: nn.Module) -> tuple[int, str] | None:
        diverged = _Comparison(small, solution, choice).difference(example)
        return None if diverged is None else (len(solution.steps) - diverged.step, str(diverged))

    problems = []
    for follower in followers(model):
        everywhere = together(new_sizes(solution, choice, Scales(solution, choice)).values())
        more, problem = follower.width_edits(model, plan, everywhere, difference)
        plan = plan.with_edits((*plan.edits, *more)) if more else plan
        problems.append(problem)
    return plan, "\n".join(filter(None, problems))


def find_difference_on_device(model: nn.Module, solution: Solution, choice: Choice, example: Any) -> str:
    """Return how a narrow model differs from the prediction on its device; or ""."""
    for training, outputs in zip(solution.modes, solution.outputs):
        twin = clone(model)  # a forward pass may leave things behind
        try:
            with in_mode(twin, training):
                shapes = [tuple(tensor.shape) for tensor in tensors_in(call(twin, copy_tensors(example)))]
        except Exception as error:
            return first_line(error)
        if shapes != [tuple(size_of(axis, choice) for axis in tensor_axes) for tensor_axes in outputs]:
            return f"the output has the shapes {shapes}"
    return ""


def _explain_divergence(model: nn.Module, solution: Solution, choice: Choice, difference: _DivergentStep) -> str:
    step = solution.steps[difference.step]
    where = step.module or "the model itself"
    hint = "A width may be kept in a constant that surgery cannot see: make it an attribute or read it from a shape"
    inside = [other for other in solution.steps if step.module and is_inside(other.module, step.module)]
    if torn := _find_torn_sizes(inside, step, choice):
        parts = {atom for other in inside for axis in other.axes() for atom in atoms(axis)}
        heads = any(part.grouping == "heads" and not part.why and part not in choice for part in parts)
        drop = 'heads="drop", ' if heads else ""
        hint = (
            f"Widths of {torn[0]} positions become {' and '.join(map(str, torn[1:]))} there (heads shrink inside of "
            "each, or cannot be followed), and the code may take one for the other: keep them whole with "
            f'keep=["{step.module}"], or try {drop}a share or a `rounding` with which they agree'
        )
    elif not any(size_of(axis, choice) < axis.size for axis in step.axes()) and "a result of shape" in str(difference):
        hint = (
            "No width lies there: its size follows from numbers that the code computes (a padding to a multiple, boxes "
            "that it finds), and the narrow model computes others. Narrow the part in front of it (a backbone) as a "
            "model of its own, or give an example with which nothing is found"
        )
    elif difference.computed:
        hint = (
            "The code computes that number from a width (a share of it, say), and the right number for fewer positions "
            "is not known: write it as a plain number, or keep the width whole with keep=[...]"
        )
    if splits_interleaved(step):
        hint = f"What is split there cannot become narrower: {SHUFFLED}. Keep these modules whole with keep=[...]"
        if (source := step.sources[0]) and isinstance(source[0], str):
            hint = f"{join(*source)} holds several weights, one behind the other: make each a parameter of its own"
    return f"{type(model).__name__} does not run with narrow widths: in {where} ({step.name}): {difference}. {hint}"


def _find_torn_sizes(inside: list[Step], step: Step[Axis], choice: Choice) -> list[int]:
    """Return [a size that becomes several sizes in a module, *these sizes]; or []."""
    sizes: dict[int, set[int]] = {}
    for other in inside:
        for axis in other.axes():
            if any(atom.makers for atom in atoms(axis)):
                sizes.setdefault(axis.size, set()).add(size_of(axis, choice))
    torn_sizes = [axis.size for axis in step.axes() if len(sizes.get(axis.size, ())) > 1]
    return [max(torn_sizes), *sorted(sizes[max(torn_sizes)])] if torn_sizes else []


def splits_interleaved(step: Step[Axis]) -> bool:
    """Return whether an operation divides an axis with interleaved parts.

    Once the factors of an interleaved part keep unequal shares, the code divides the narrow axis in the wrong places.
    """
    split = step.name in SPLITS and step.inputs
    return bool(split) and any(
        isinstance(axis, Sum) and any(isinstance(term, Product) for term in axis.parts) for axis in step.inputs[0]
    )


class _Comparison(Operations):
    """Compares the narrow model's operations with the full model's steps.

    Operations, the tensors that they take and the shapes of results must be as predicted, and so must numbers among the
    arguments: sizes of axes change as the axes do, factors by a power of an axis's share, and other numbers stay.

    Args:
        scales: the new values of numbers that scale sums, for each step.
        changed: the old numbers of attributes that got new ones; where an operation takes one, `scales` must know it.
        shapes: the new sizes for each old size, where nothing but shapes can have changed a number.
    """

    def __init__(
        self,
        small: nn.Module,
        solution: Solution,
        choice: Choice,
        scales: Scales | None = None,
        changed: Collection[float] = (),
        shapes: SizeChanges | None = None,
    ):
        super().__init__()
        self.solution, self.choice, self.done, self.origins = solution, choice, 0, Origins(named_tensors(small))
        self.scales, self.changed, self.shapes = scales, changed, shapes or {}
        self.same: set[tuple[int, Any]] = set()  # (step, number) of numbers that are as in the full model
        self.small, self.wrapped = small, Wrapped()
        wraps = any(key.endswith(ITEM) for step in solution.steps for key in step.scalars)
        self.wrapping = Wrapping(self.wrapped) if wraps else nullcontext()

    @plain_attention
    def difference(self, example: Any) -> _DivergentStep | None:
        """Return the narrow model's first operation that is not as predicted, or None."""
        last = len(self.solution.steps) - 1
        for training, outputs, returned in zip(self.solution.modes, self.solution.outputs, self.solution.returned):
            try:
                # Watched like the full model: without hooks torch's own layers may use other, fused operations.
                with in_mode(self.small, training), watching(self.small), self.wrapping, self:
                    output = call(self.small, copy_tensors(example))
            except Exception as error:
                return (
                    error
                    if isinstance(error, _DivergentStep)
                    else _DivergentStep(min(self.done, last), first_line(error))
                )
            expected = [tuple(size_of(axis, self.choice) for axis in tensor_axes) for tensor_axes in outputs]
            if [tuple(tensor.shape) for tensor in tensors_in(output)] != expected:
                return _DivergentStep(min(self.done, last), "the output has another shape")
            if self.origins.of(tensors_in(output)) != returned:  # which an index that was taken for a width has picked
                return _DivergentStep(min(self.done, last), "the output is another tensor")
        return None if self.done > last else _DivergentStep(self.done, "the narrow model stops early")

    def run(self, func, args, kwargs):
        inputs = tensors_in((args, kwargs))
        sources = self.origins.of(inputs)
        result = self.result(func, args, kwargs)
        name, outputs, bound = operation_name(func), tensors_in(result), bind(func, args, kwargs)
        self.wrapped.follow(func, bound, inputs, outputs)
        if not is_step(func):
            self.origins.note_passed(inputs, outputs)
            return result
        if self.done >= len(self.solution.steps):
            raise _DivergentStep(self.done - 1, f"the narrow model continues with {name}")
        step = self.solution.steps[self.done]
        if step.name != name:
            raise _DivergentStep(self.done, f"{name} instead of {step.name}")
        if step.decided is not None and self._stays(step.outputs) and not self.wrapped.holds(inputs):
            # The models' values differ, so decisions by value (which expert gets which token) may differ, too. Take the
            # full model's decisions, so that both models run the same operations.
            result = tree_map(
                lambda old, new: new if old is None else old, step.decided, result, is_leaf=lambda part: part is None
            )
            outputs = tensors_in(result)
        scalars = scalars_of(func, bound) | self.wrapped.scales(func, bound, inputs)
        changed_numbers = ", ".join(
            f"{key}={value} instead of {step.scalars.get(key)}"
            for key, value in scalars.items()
            if key not in step.numbers and not self._may_become(step, step.scalars.get(key), value)
        )
        for tensor_axes, tensor in zip(step.outputs, outputs):
            expected = [size_of(axis, self.choice) for axis in tensor_axes]
            left_empty = tensor.is_meta and 0 in expected  # statistics that some kernels do not compute
            if expected != list(tensor.shape) and not left_empty:
                message = f"a result of shape {list(tensor.shape)} where {expected} was expected"
                raise _DivergentStep(
                    self.done, message + (changed_numbers and f" ({changed_numbers})"), bool(changed_numbers)
                )
        if sources != step.sources:
            raise _DivergentStep(self.done, f"{name} of other tensors")
        for key, axis in step.numbers.items():
            self._check_number(key, axis, bound, inputs)
        if changed_numbers:
            raise _DivergentStep(self.done, changed_numbers, computed=True)
        self.same |= {(self.done, value) for value in scalars.values() if isinstance(value, int | float)}
        self.origins.note_made(self.done, outputs)
        self.done += 1
        return result

    def _stays(self, tensors: list[Axes]) -> bool:
        return all(size_of(axis, self.choice) == axis.size for tensor_axes in tensors for axis in tensor_axes)

    def _check_number(self, key: str, axis: Axis | list[Axis], bound: dict[str, Any], inputs: list[Tensor]) -> None:
        """Check that an argument that was the size of an axis is its new size."""
        if key not in bound or key == "normalized_shape":  # the name of an attribute, or a size that the shapes show
            return
        expected = [size_of(a, self.choice) for a in axis] if isinstance(axis, list) else size_of(axis, self.choice)
        value = bound[key]
        if key == "start" and value < 0:
            value += inputs[0].shape[bound["dim"]]
        if value != expected:
            raise _DivergentStep(self.done, f"{key}={value} where {expected} was expected")

    def _may_become(self, step: Step[Axis], old: Any, new: Any) -> bool:
        """Return whether a number may become another: a size, or a power of a share."""
        if old == new:
            return True
        if not isinstance(old, int | float) or not isinstance(new, int | float) or isinstance(old, bool) or not old:
            return False
        pairs = [(size, n) for size, news in self.shapes.items() for n in news if n != size]
        if any(math.isclose(old - new, d, rel_tol=1e-9) for a, b in pairs for d in (a - b, math.log(a / b))):
            return True
        if self.scales and any(math.isclose(old, value, rel_tol=1e-9) for value in self.changed):
            known = self.scales.of(self.done)
            return any(math.isclose(a, old, rel_tol=1e-6) and math.isclose(b, new, rel_tol=1e-6) for a, b in known)
        sizes = step_sizes(step, self.choice)
        sizes |= {
            axis.size: {size_of(axis, self.choice)} | sizes.get(axis.size, set())
            for axis in (*step.axes(), *step.summed)
        }
        if isinstance(old, int) and isinstance(new, int):
            return new in sizes.get(old, ())
        shares = [n / size for size, news in sizes.items() for n in news if size]
        # a tensor that gave the number may be of single precision
        return any(math.isclose(new / old, s**p, rel_tol=1e-6) for s in shares for p in (-1, -0.5, -0.25, 0.25, 0.5, 1))
