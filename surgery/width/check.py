"""The check of a plan: whether the model that it makes does what was predicted.

The narrow model runs beside the full one's trace. Attributes that store widths are corrected until every operation is
as the algebra of axes predicts.
"""

import math
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from traceback import walk_tb
from typing import Any, NamedTuple

from torch import Tensor, nn

from surgery.configuration import holder_of, is_settings
from surgery.errors import first_line
from surgery.forward import call, copied, in_mode, named_tensors, tensors_in, watching
from surgery.names import is_inside, joined, outwards
from surgery.plan import Plan
from surgery.plan.edits import apply_edit, attribute_of, set_attribute
from surgery.torch_private import Operations, tree_map
from surgery.width.axes import SHUFFLED
from surgery.width.config import config_edits
from surgery.width.constants import (
    NewSizes,
    Sizes,
    argument_sizes,
    certain_changes,
    layer_edits,
    new_sizes,
    possible_changes,
    renewals,
    step_sizes,
    together,
)
from surgery.width.rules.registry import is_step, operation_name
from surgery.width.scales import Scales
from surgery.width.solve import SPLITS, Axes, Axis, Choice, Product, Solution, Sum, atoms, size_of
from surgery.width.steps import Step, bind, scalars_of
from surgery.width.trace import Origins

Values = dict[tuple[str, str], Any]  # (module, attribute) -> value
_ATTEMPTS = 40  # to get the narrow model past one step


class Divergence(NamedTuple):
    """The first step at which the narrow model does something else than predicted, whatever its attributes are."""

    step: int
    difference: str
    message: str


class _Diverged(Exception):
    """At this step the narrow model does something else than predicted; `computed`: it computes with another number."""

    def __init__(self, step: int, message: str, computed: bool = False):
        super().__init__(message)
        self.step, self.computed = step, computed
        self.modules: list[str] = []


def checked_plan(model: nn.Module, plan: Plan, solution: Solution, choice: Choice, example: Any) -> Plan | Divergence:
    """The plan with edits that correct attributes, found by running the narrow model and mending the first difference.

    `Divergence` if no choice of attributes makes it run to the end.
    """
    sizes = new_sizes(solution, choice)
    everywhere = together(sizes.values())
    small = plan.built(model)
    edits = list(layer_edits(small, solution, choice))
    for edit in edits:
        apply_edit(small, edit)
    base = (*plan.edits, *edits)
    inside: dict[str, list[NewSizes]] = defaultdict(list)
    for name, found in sizes.items():
        for around in outwards(name):
            inside[around].append(found)
    chosen: Values = {}
    for name, module in model.named_modules():
        for attribute, value in certain_changes(module, together(inside[name])).items():
            chosen[name, attribute] = value

    scales = Scales(solution, choice)

    old: list[int] = []
    on_meta = all(tensor.is_meta for _, tensor in named_tensors(model))

    def tried(values: Values) -> _Diverged | None:
        before: set[float] = set()
        old.clear()
        with _unchanged(small):
            for (name, attribute), value in values.items():
                if isinstance(value, float):
                    before.add(attribute_of(small, name, attribute))
                set_attribute(small, name, attribute, value)
            shapes = everywhere.numbers if on_meta and not values else {}
            predicted = _Predicted(small, solution, choice, scales, before, shapes)
            found = predicted.difference(example)
            old.extend(predicted.old)
            return found

    here = tried(chosen)
    while here is not None:
        options = _options(model, solution.steps[here.step], here.modules, everywhere.numbers, choice, chosen)
        seen: list[Values] = []
        for option in islice((option for option in options if option not in seen), _ATTEMPTS):
            seen.append(option)
            there = tried(option)
            if there is None or there.step > here.step:
                here, chosen = there, option
                break
        else:
            return Divergence(here.step, str(here), _no_way_on(model, solution, choice, here))
    chosen = _followed(model, solution, choice, chosen, tried, old)
    for name, module in small.named_modules():
        if isinstance(module, nn.MultiheadAttention):  # it assumes embed_dim = num_heads * head_dim
            heads = chosen.get((name, "num_heads"), module.num_heads)
            chosen[name, "head_dim"] = module.embed_dim // heads
    sets = [{"do": "set", "module": m, "attribute": a, "value": v} for (m, a), v in chosen.items()]
    return plan.with_edits((*base, *sets))


def _followed(
    model: nn.Module,
    solution: Solution,
    choice: Choice,
    chosen: Values,
    tried: Callable[[Values], _Diverged | None],
    old: list[int],
) -> Values:
    """The values with those that divide sums by how many positions there were, as norms written by hand do.

    Without them the narrow model runs, too, but takes a mean over other numbers than there are.

    Args:
        tried: how far the narrow model runs with some values.
        old: the steps that still divide so; `tried` changes it.
    """
    left = [*old]
    while left:
        step = solution.steps[left[0]]
        sizes = {axis.size: {size_of(axis, choice)} for axis in step.summed}
        options = (
            chosen | {(name, key): value}
            for name in outwards(step.module)
            for key, values in possible_changes(model.get_submodule(name), sizes, {}).items()
            for value in values
        )
        for option in options:
            if option != chosen and tried(option) is None and len(old) < len(left):
                chosen, left = option, [*old]
                break
        else:
            left = left[1:]  # it is a number of the code
    return chosen


def described(model: nn.Module, plan: Plan, solution: Solution, choice: Choice, example: Any) -> Plan:
    """A checked plan after which the configuration says the new widths, see `config_edits`."""

    def difference(small: nn.Module) -> tuple[int, str] | None:
        found = _Predicted(small, solution, choice).difference(example)
        return None if found is None else (len(solution.steps) - found.step, str(found))

    if holder_of(model) is None:  # as most models: their widths lie in attributes alone
        return plan
    everywhere = together(new_sizes(solution, choice).values())
    more = config_edits(model, plan, everywhere, difference)
    return plan.with_edits((*plan.edits, *more)) if more else plan


def _no_way_on(model: nn.Module, solution: Solution, choice: Choice, difference: _Diverged) -> str:
    step = solution.steps[difference.step]
    where = step.module or "the model itself"
    hint = "A width may be kept in a constant that surgery cannot see: make it an attribute or read it from a shape"
    inside = [other for other in solution.steps if step.module and is_inside(other.module, step.module)]
    if torn := _torn(inside, step, choice):
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
            "The code computes that number of a width (a share of it, say), and which one is right for fewer positions "
            "is not known: write it as a plain number, or keep the width whole with keep=[...]"
        )
    if splits_interleaved(step):
        hint = f"What is split there cannot become narrower: {SHUFFLED}. Keep these modules whole with keep=[...]"
        if (source := step.sources[0]) and isinstance(source[0], str):
            hint = f"{joined(*source)} holds several weights, one behind the other: make each a parameter of its own"
    return f"{type(model).__name__} does not run with narrow widths: in {where} ({step.name}): {difference}. {hint}"


def _torn(inside: list[Step], step: Step[Axis], choice: Choice) -> list[int]:
    """The size of widths in the steps of a step's module, and what they become, if that is not the same; or []."""
    sizes: dict[int, set[int]] = {}
    for other in inside:
        for axis in other.axes():
            if any(atom.makers for atom in atoms(axis)):
                sizes.setdefault(axis.size, set()).add(size_of(axis, choice))
    mine = [axis.size for axis in step.axes() if len(sizes.get(axis.size, ())) > 1]
    return [max(mine), *sorted(sizes[max(mine)])] if mine else []


def splits_interleaved(step: Step[Axis]) -> bool:
    """Whether an operation divides an axis of several parts of which one is interleaved from parts of its own.

    The code then divides the narrow axis elsewhere, as soon as the parts of its parts keep unequal shares.
    """
    split = step.name in SPLITS and step.inputs
    return bool(split) and any(
        isinstance(axis, Sum) and any(isinstance(term, Product) for term in axis.parts) for axis in step.inputs[0]
    )


def _options(
    model: nn.Module, step: Step[Axis], running: list[str], everything: Sizes, choice: Choice, chosen: Values
) -> Iterator[Values]:
    """Other values that may mend a step: attributes of its module, of those around it, of those whose code ran.

    One attribute alone comes before all of a module, which may mean something else though they are as large. Last come
    those of configurations, which code reads while it runs as an exception, and which say more than that.
    """
    sizes = argument_sizes(step, choice), step_sizes(step, choice)
    places = [
        *((name, seen) for seen in sizes for name in outwards(step.module)),
        *((name, everything) for name in running),
    ]

    def changes(name: str, found: Mapping[str, list[Any]]) -> Iterator[Values]:
        yield from (chosen | {(name, key): value} for key, values in found.items() for value in values)
        if len(found) > 1:
            yield chosen | {(name, key): values[-1] for key, values in found.items()}

    for name, known in places:
        mine = {attribute: value for (owner, attribute), value in chosen.items() if owner == name}
        yield from changes(name, possible_changes(model.get_submodule(name), known, mine))
        yield from ({key: chosen[key] for key in chosen if key != (name, dropped)} for dropped in mine)
        if len(mine) > 1:
            yield {key: value for key, value in chosen.items() if key[0] != name}
    looked_at = set()  # modules share their configuration
    for name, known in places:
        for holder, config in vars(model.get_submodule(name)).items():
            if is_settings(config) and (id(config), id(known)) not in looked_at:
                looked_at.add((id(config), id(known)))
                held = {f"{holder}.{key}": value for key, value in vars(config).items()}
                now = {key: chosen[name, key] for key in held if (name, key) in chosen}
                yield from changes(name, renewals(held, known, now))


_CONTAINERS = {dict, OrderedDict, list, set, tuple, bool, int, float, str, type(None)}  # no configurations


@contextmanager
def _unchanged(model: nn.Module) -> Iterator[None]:
    """Undo all changes of attributes of the model and its configurations: forward passes may leave things behind."""
    modules = list(model.modules())
    before = [(dict(vars(m)), dict(m._buffers), dict(m._parameters)) for m in modules]
    values = (v for plain, _, _ in before for v in plain.values() if type(v) not in _CONTAINERS)
    held = {id(value): value for value in values if is_settings(value)}
    settings = [(vars(value), dict(vars(value))) for value in held.values()]
    try:
        yield
    finally:
        for now, plain in settings:
            now.clear()
            now.update(plain)
        for module, (plain, buffers, parameters) in zip(modules, before):
            vars(module).clear()
            vars(module).update(plain)
            module._buffers.clear()
            module._buffers.update(buffers)
            module._parameters.clear()
            module._parameters.update(parameters)


class _Predicted(Operations):
    """Compares the operations of the narrow model with the steps of the full one, as they happen.

    Operations, the tensors that they take and the shapes of results must be as predicted, and so must numbers among the
    arguments: those that are sizes of axes change as these do, factors by a power of an axis's share, others stay.

    Args:
        scales, changed: scales that attributes stored, and how they change where an operation takes one of them.
        shapes: the sizes that change, where nothing but shapes can have changed a number.
    """

    def __init__(
        self,
        small: nn.Module,
        solution: Solution,
        choice: Choice,
        scales: Scales | None = None,
        changed: Collection[float] = (),
        shapes: Sizes | None = None,
    ):
        super().__init__()
        self.solution, self.choice, self.done, self.origins = solution, choice, 0, Origins(small)
        self.scales, self.changed, self.shapes = scales, changed, shapes or {}
        self.old: list[int] = []  # steps that divide a sum by the number of positions that it had
        self.small = small

    def difference(self, example: Any) -> _Diverged | None:
        """The first operation of the narrow model that is not as predicted, or None."""
        last = len(self.solution.steps) - 1
        for training, outputs in zip(self.solution.modes, self.solution.outputs):
            try:
                # Watched like the full model: without hooks torch's own layers may use other, fused operations.
                with in_mode(self.small, training), watching(self.small), self:
                    output = call(self.small, copied(example))
            except Exception as error:
                found = error if isinstance(error, _Diverged) else _Diverged(min(self.done, last), first_line(error))
                found.modules = _running(self.small, error)
                return found
            expected = [tuple(size_of(axis, self.choice) for axis in found) for found in outputs]
            if [tuple(tensor.shape) for tensor in tensors_in(output)] != expected:
                return _Diverged(min(self.done, last), "the output has another shape")
        return None if self.done > last else _Diverged(self.done, "the narrow model stops early")

    def run(self, func, args, kwargs):
        inputs = tensors_in((args, kwargs))
        sources = self.origins.of(inputs)
        result = self.result(func, args, kwargs)
        name, outputs = operation_name(func), tensors_in(result)
        if not is_step(func):
            self.origins.passed(inputs, outputs)
            return result
        if self.done >= len(self.solution.steps):
            raise _Diverged(self.done - 1, f"the narrow model continues with {name}")
        step = self.solution.steps[self.done]
        if step.name != name:
            raise _Diverged(self.done, f"{name} instead of {step.name}")
        if step.decided is not None and self._stays(step.outputs):
            # Numbers differ, so what they decide may: which expert gets which token. Both models are to run alike.
            result = tree_map(
                lambda old, new: new if old is None else old, step.decided, result, is_leaf=lambda part: part is None
            )
            outputs = tensors_in(result)
        bound = bind(func, args, kwargs)
        scalars = scalars_of(func, bound)
        computed = ", ".join(
            f"{key}={value} instead of {step.scalars.get(key)}"
            for key, value in scalars.items()
            if key not in step.numbers and not self._may_become(step, step.scalars.get(key), value)
        )
        for found, tensor in zip(step.outputs, outputs):
            expected = [size_of(axis, self.choice) for axis in found]
            left_empty = tensor.is_meta and 0 in expected  # statistics that some kernels do not compute
            if expected != list(tensor.shape) and not left_empty:
                message = f"a result of shape {list(tensor.shape)} where {expected} was expected"
                raise _Diverged(self.done, message + (computed and f" ({computed})"), bool(computed))
        if sources != step.sources:
            raise _Diverged(self.done, f"{name} of other tensors")
        for key, axis in step.numbers.items():
            self._check_number(key, axis, bound, inputs)
        for key, value in scalars.items():
            if name in ("div", "mul") and self.scales and value == step.scalars.get(key) and self._is_old(step, value):
                self.old.append(self.done)
        if computed:
            raise _Diverged(self.done, computed, computed=True)
        self.origins.made(self.done, outputs)
        self.done += 1
        return result

    def _stays(self, tensors: list[Axes]) -> bool:
        return all(size_of(axis, self.choice) == axis.size for found in tensors for axis in found)

    def _check_number(self, key: str, axis: Axis | list[Axis], bound: dict[str, Any], inputs: list[Tensor]) -> None:
        """An argument that was the size of an axis must be its new size."""
        if key not in bound or key == "normalized_shape":  # the name of an attribute, or a size that the shapes show
            return
        expected = [size_of(a, self.choice) for a in axis] if isinstance(axis, list) else size_of(axis, self.choice)
        value = bound[key]
        if key == "start" and value < 0:
            value += inputs[0].shape[bound["dim"]]
        if value != expected:
            raise _Diverged(self.done, f"{key}={value} where {expected} was expected")

    def _is_old(self, step: Step[Axis], value: Any) -> bool:
        """Whether it is the size of an axis that was summed, which has become another one."""
        assert self.scales
        return any(axis.size == value != size_of(axis, self.choice) for axis in self.scales.summed(step))

    def _may_become(self, step: Step[Axis], old: Any, new: Any) -> bool:
        """Whether a number may change so: as the size of an axis does, or by a power of an axis's share."""
        if old == new:
            return True
        if not isinstance(old, int | float) or not isinstance(new, int | float) or isinstance(old, bool) or not old:
            return False
        pairs = [(size, n) for size, news in self.shapes.items() for n in news if n != size]
        if any(math.isclose(old - new, d, rel_tol=1e-9) for a, b in pairs for d in (a - b, math.log(a / b))):
            return True
        if self.scales and any(math.isclose(old, value, rel_tol=1e-9) for value in self.changed):
            known = self.scales.of(self.done)
            return any(math.isclose(a, old, rel_tol=1e-9) and math.isclose(b, new, rel_tol=1e-9) for a, b in known)
        sizes = step_sizes(step, self.choice)
        sizes |= {
            axis.size: {size_of(axis, self.choice)} | sizes.get(axis.size, set())
            for axis in (*step.axes(), *step.summed)
        }
        if isinstance(old, int) and isinstance(new, int):
            return new in sizes.get(old, ())
        shares = [n / size for size, news in sizes.items() for n in news if size]
        return any(math.isclose(new / old, s**p, rel_tol=1e-9) for s in shares for p in (-1, -0.5, -0.25, 0.25, 0.5, 1))


def _running(model: nn.Module, error: Exception) -> list[str]:
    """The modules whose methods were running when an error was raised, innermost first."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = [frame.f_locals.get("self") for frame, _ in walk_tb(error.__traceback__)]
    return list(dict.fromkeys(names[id(owner)] for owner in reversed(frames) if id(owner) in names))
