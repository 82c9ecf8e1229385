"""Wider networks that compute what they did: the inverse of `narrow`."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from numbers import Real
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.forward import Observed, check_runs, named_tensors, observe, vary
from surgery.names import is_inside, join
from surgery.plan import Index, Plan, Ranges, Source, as_runs, structure
from surgery.plan.edits import attribute_of
from surgery.plan.positions import as_index, positions
from surgery.states import names_by_id, state
from surgery.widening.comparison import find_change, trial
from surgery.width import axes
from surgery.width.axes import Why, lost, role
from surgery.width.check import CheckedPlan, Divergence, check_plan, with_configuration
from surgery.width.choose import Chosen, Demand, Heads, check_demand, choose
from surgery.width.plan import plan_of
from surgery.width.rules.registry import RULES
from surgery.width.shortfall import UnshrunkWidth, find_whole, list_whole, unused_tensors
from surgery.width.solve import SPLITS, Atom, Axis, Choice, Solution, Sum, atoms, factors, solve
from surgery.width.steps import Step, alike, same_code
from surgery.width.trace import run_one_by_one, trace_in_place

Mode = Literal["copy", "zero"]
_MOST_LEFT = 12  # operations around which widths are left as they are because they would compute something else
_MEANS = {"mean", "var_mean", "native_layer_norm", "native_group_norm"}
_MOST_WIDE = 1 << 24  # positions; what is asked for beyond that is a slip of the keyboard

_log = logging.getLogger(__name__)


def widen(
    model: nn.Module,
    *,
    rate: float,
    example: Any,
    mode: Mode = "copy",
    keep: Sequence[str] = (),
    heads: Heads = "drop",
    noise: float = 0.0,
    generator: torch.Generator | None = None,
    output: Callable[[Any], Any] | None = None,
    strict: bool = False,
) -> tuple[nn.Module, Plan]:
    """Return a wider copy of a module that computes the same in evaluation mode.

    Each width of C positions gets floor(rate * C) of them. The first C positions are the old ones; the others repeat
    them in turn. What reads a width makes up for that:

    - `copy`: each of k copies is read with 1/k of the weight (Chen et al., "Net2Net", ICLR 2016, section 3.1);
    - `zero`: copies are read with weight 0, so that every old number stays: the plan cuts the model out again bit for
      bit, and so does `narrow` with 1/rate if every width has grown.

    The wide model runs once on the example in float64 beside the old one, and every operation is compared. If the model
    does not run in float64, both run in float32 and are compared less strictly. A width stays as it is where an
    operation would compute something else. A norm over a width (layer norm, group norm) allows whole multiples only,
    since then its mean and variance stay. A width stays as it is if one tensor both makes it and reads it, as an
    embedding does that is tied to the output layer.

    Args:
        model: any module with weights; it is not changed.
        rate: above 1.
        example: an input, as for `surgery.narrow`.
        mode: see above.
        keep: patterns of modules whose tensors stay as they are, as for `surgery.narrow`.
        heads: `drop` repeats heads of an attention, the inverse of `narrow(..., heads="drop")`. With `inside` they stay
            as they are, and so does their width: the products of queries and keys would grow.
        noise: the standard deviation of normal noise, as a share of the tensor's own, that is added to weights that
            make new positions, so that these learn something different. In mode `zero` outputs stay the same unless a
            norm runs over the width; in mode `copy` they change slightly.
        generator: of the noise, on the CPU.
        output: what of the output has to keep its shape, as for `surgery.narrow`.
        strict: whether these are errors: a hidden width that does not grow, and a tensor that the example does not use
            and that is as long as a width that grows. Otherwise they are logged with the reason.

    Returns:
        The wide module, and the plan of the old model as a part of it: `plan.extract(state(wide))` are the first
        positions of each width, as with `graft`.

    Raises:
        SurgeryError: if no width can grow, or with `strict` not all of them, with the reasons.

    >>> net, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.randn(5, 2)
    >>> wide, plan = widen(net, rate=2, example=x)
    >>> wide[0], torch.allclose(wide(x), net(x), atol=1e-6)
    (Linear(in_features=2, out_features=6, bias=True), True)
    >>> wide, plan = widen(net, rate=1.5, example=x, mode="zero")
    >>> all(torch.equal(tensor, state(net)[name]) for name, tensor in plan.extract(state(wide)).items())
    True
    """
    _check(model, rate, mode, noise, example)
    demand = check_demand(model, Demand(1 / rate, keep=keep, heads=heads))
    with run_one_by_one():
        growth = _find_growing(model, example, output, demand, rate, mode)
    whole = list_whole(model, growth.whole, "grow")
    if not whole and (free := [atom.size for atom in growth.chosen.sliced if not atom.order]) and not growth.choice:
        raise SurgeryError(
            f"no width gains a position at rate={rate!r}: the largest has {max(free)}, so give a rate of "
            f"{1 + 1 / max(free):.4g} or more",
            code="width",
        )
    if not growth.choice or (whole and strict):
        raise SurgeryError(whole or f"{type(model).__name__} has no hidden width", code="width")
    plan = growth.outcome
    assert isinstance(plan, Plan)  # of the last attempt, which computes the same
    unused = unused_tensors(growth.solution, growth.choice, model, keep, "grow")
    for shortfall in filter(None, (whole, unused, growth.configuration_problem)):
        if strict:
            raise SurgeryError(shortfall, code="strict")
        _log.warning(shortfall)
    wide = growth.build(model, plan)
    if noise:
        _add_noise(wide, growth, noise, generator)
    return wide, _invert_plan(model, wide, plan)


def _check(model: Any, rate: Any, mode: Any, noise: Any, example: Any) -> None:
    number = isinstance(rate, Real) and not isinstance(rate, bool) and math.isfinite(rate)
    if not number or float(rate) <= 1:
        raise SurgeryError(f"rate says how many times as wide it becomes, above 1, got {rate!r}", code="argument")
    if mode not in get_args(Mode):
        raise SurgeryError(f"unknown mode={mode!r}: choose {' or '.join(get_args(Mode))}", code="argument")
    if isinstance(noise, bool) or not isinstance(noise, Real) or not 0 <= float(noise) < math.inf:
        raise SurgeryError(f"noise is a share of the weights' deviation, 0 or more, got {noise!r}", code="argument")
    check_runs(model, example, "widen")
    if any(tensor.is_meta for tensor in model.parameters()):
        raise SurgeryError(f"{type(model).__name__} has no weights (meta device): load some first", code="values")


class Readers(NamedTuple):
    """The places that read widths.

    Attributes:
        of: by (module, attribute) and axis of a tensor of the model the atoms that a product sums along it.
        computed: (step, atom) where products sum along an axis that no tensor of the model has: both of their factors
            are computed, as queries and keys are.
    """

    of: dict[tuple[tuple[str, str], int], set[Atom]]
    computed: list[tuple[int, Atom]]


def find_readers(solution: Solution) -> Readers:
    """Return the readers of every width."""
    result = Readers({}, [])
    for number, step in enumerate(solution.steps):
        if step.name == "scaled_dot_product_attention":
            result.computed.extend((number, atom) for atom in atoms(step.inputs[0][-1]))
        pairs = list(factors(step))
        for atom in dict.fromkeys(atom for _, _, summed in pairs for atom in summed):
            places = [_find_held(solution, step, which, axis) for which, axis, _ in pairs]
            place = next((place for place in reversed(places) if place and place[1] is not None), None)
            if place is None:
                result.computed.append((number, atom))
            else:
                result.of.setdefault(place, set()).add(atom)
    return result


def _find_held(
    solution: Solution, step: Step[Axis], which: int, axis: int | None
) -> tuple[tuple[str, str], int | None] | None:
    """Return the model's tensor, and its axis, that an axis of a step's input is.

    The tensor may be in another layout there.
    """
    while axis is not None:
        source: Any = step.sources[which]
        if source is None:
            return None
        tensor = isinstance(source[0], str)
        source_axes = solution.tensors[source] if tensor else solution.steps[source[0]].outputs[source[1]]
        place = axis - len(step.inputs[which]) + len(source_axes)  # expand has put axes in front
        if place < 0:
            return None
        if tensor:
            return source, place if source_axes[place] is step.inputs[which][axis] else None
        before = solution.steps[source[0]]
        rule = RULES.get(before.name)
        if not before.inputs or not ((rule and rule.carries) or before.name in SPLITS):
            return None
        axis, step, which = _axis_before(before, source_axes, place), before, 0
    return None


def _axis_before(step: Step[Axis], after: tuple[Axis, ...], axis: int) -> int | None:
    """Return the axis of a step's first input that becomes an axis of its result.

    None if the axis is only a part of one.
    """
    before = step.inputs[0]
    if step.name in ("t", "transpose", "permute", "swapaxes", "swapdims", "adjoint"):
        order = list(range(len(before)))
        if "dims" in step.scalars:
            order = [dim % len(before) for dim in step.scalars["dims"]]
        elif len(before) > 1:
            i, j = (step.scalars.get(f"dim{n}", step.scalars.get(f"axis{n}", n)) for n in (0, 1))
            order[i], order[j] = order[j], order[i]
        return order[axis]
    start = 0
    for place, target in enumerate(after[: axis + 1]):
        match = next((i for i in range(start, len(before)) if before[i] is target), None)
        if place == axis:
            return match
        start = start if match is None else match + 1
    return None


def compute_shares(axis: Axis, read: set[Atom], choice: Choice, mode: str) -> Tensor:
    """Return the share [new size] of the old weight with which each position is read.

    >>> width = Atom(2)
    >>> compute_shares(width, {width}, {width: [0, 1, 0]}, "copy").tolist()
    [0.5, 1.0, 0.5]
    """
    if isinstance(axis, Atom):
        places = torch.as_tensor(choice.get(axis, range(axis.size)))
        if axis not in read:
            return torch.ones(len(places), dtype=torch.float64)
        if mode == "zero":
            return (torch.arange(len(places)) < axis.size).double()
        return 1 / places.bincount(minlength=axis.size)[places].double()
    parts = [compute_shares(part, read, choice, mode) for part in axis.parts]
    if isinstance(axis, Sum):
        return torch.cat(parts)
    result = parts[0]
    for part in parts[1:]:
        result = (result[:, None] * part).flatten()
    return result


@dataclass(frozen=True)
class _Growth:
    """Widths that grow, and what comes of it.

    Attributes:
        values: the state of the model that is to grow.
        model, example: a copy of it, and an input, for which all numbers can be compared.
        solution, demand, chosen: the axes of its trace, what was asked of them, and which widths would shrink by it.
        choice: the positions of the wide model; a width that grows repeats its positions.
        readers: what reads them.
        rate, mode: as for `widen`.
    """

    values: Mapping[str, Tensor]
    model: nn.Module
    example: Any
    solution: Solution
    demand: Demand
    chosen: Chosen
    choice: Choice
    readers: Readers
    rate: float
    mode: Mode

    @cached_property
    def whole(self) -> list[UnshrunkWidth]:
        """The hidden widths that stay as they are although they were to grow."""
        return find_whole(self.solution, self.demand, self.chosen)

    @cached_property
    def outcome(self) -> Plan | tuple[int, Why]:
        """The plan if the wide model computes the same, else the wrong step and why."""
        if not self.choice:
            return plan_of(self.model, self.values, self.solution, self.choice)
        checked = self._checked.found
        if isinstance(checked, Divergence):
            return checked.step, lost(f"the code there does not run wider: {checked.difference}")
        number = self._find_change(checked)
        if number is None:
            plan, _ = self._configured
            number = None if plan is checked else self._find_change(plan)  # the code may compute with its configuration
            if number is None:
                return plan
        step = self.solution.steps[number]
        where = f"{step.name} in {step.module or 'the model itself'}"
        why = self.explain_tie(step.module) or f"{where} would compute something else of repeated positions"
        fraction = self.rate % 1 and step.name in _MEANS
        return number, role(why + (" (a whole number as rate keeps means and variances)" if fraction else ""))

    @property
    def configuration_problem(self) -> str:
        """The reason why the configuration cannot hold the new widths; "" without one."""
        return self._configured[1] if self.choice else ""

    @cached_property
    def _configured(self) -> tuple[Plan, str]:
        """The checked plan with a configuration that says the new widths, or why none can."""
        seen = self._checked
        assert isinstance(seen.found, Plan)
        return with_configuration(seen.model, seen.found, self.solution, self.choice, seen.example)

    def _find_change(self, plan: Plan) -> int | None:
        """Return the first step at which the wide model of a plan computes something else."""
        return find_change(self.model, self.build(self.model, plan), self.solution, self.choice, self.example)

    @cached_property
    def _checked(self) -> Observed[Plan | Divergence]:
        """The plan with corrected attributes, on the meta device if the model runs there."""
        plan = plan_of(self.model, self.values, self.solution, self.choice)

        def check(model: nn.Module, example: Any) -> Plan | Divergence:
            result = check_plan(model, plan, self.solution, self.choice, example)
            return result.plan if isinstance(result, CheckedPlan) else result

        seen = observe(self.model, self.example, check)
        if isinstance(seen.found, Divergence) and seen.on_meta:  # other operations may run there
            return Observed(check(self.model, self.example), self.model, self.example, False, "")
        return seen

    def explain_tie(self, module: str) -> str:
        """Return why a module's tied tensor cannot repeat positions; or "".

        Another module reads the width with it.
        """
        places: dict[int, list[tuple[str, str]]] = {}
        for key, tensor in named_tensors(self.model):
            places.setdefault(id(tensor), []).append(key)
        for keys in places.values():
            read = any(
                (key, axis) in self.readers.of for key in keys for axis in range(len(self.solution.tensors[key]))
            )
            if len(keys) > 1 and read and any(key[0] == module for key in keys):
                names = " and ".join(join(*key) for key in keys)
                return f"{names} are one tensor, which both makes the width and reads it: untie them to let it grow"
        return ""

    def build(self, model: nn.Module, plan: Plan) -> nn.Module:
        """Return the wide model, whose readers make up for the copies."""
        wide = plan.build(model)
        held = names_by_id(self.model)
        values, done = state(wide), set()
        for key, tensor in named_tensors(self.model):
            name = held.get(id(tensor))
            for axis, along in enumerate(self.solution.tensors[key] if name else ()):
                which = self.readers.of.get((key, axis), set()) & self.choice.keys()
                if which and (name, axis) not in done:
                    done.add((name, axis))
                    share = compute_shares(along, which, self.choice, self.mode)
                    shape = [-1 if i == axis else 1 for i in range(values[name].ndim)]
                    values[name].mul_(share.to(values[name]).view(shape))
        return wide


def _find_growing(
    model: nn.Module, example: Any, output: Callable[[Any], Any] | None, demand: Demand, rate: float, mode: Mode
) -> _Growth:
    """Return the widths that can grow without a change of what the model computes.

    If it would change at a place of the code, the next attempt leaves the widths there as they are.
    """
    twin, varied_example = trial(model), vary(example, torch.float64)
    try:
        trace = trace_in_place(twin, varied_example, output)
    except SurgeryError:  # torch has grouped products, which mixtures of experts use, in float32 only
        twin, varied_example = trial(model, torch.float32), vary(example, torch.float32)
        try:
            trace = trace_in_place(twin, varied_example, output)
        except SurgeryError as error:
            raise SurgeryError(f"{error} (in float32; float64 fails, too)", code=error.code) from error
    example, whole = varied_example, {}

    def attempt() -> _Growth:
        solution = solve(trace, whole)
        chosen = choose(solution, demand)
        sizes = {atom: math.floor(round(atom.size * rate, 9)) for atom in chosen.sliced if not atom.order}
        if (most := max(sizes.values(), default=0)) > _MOST_WIDE:
            raise SurgeryError(f"rate={rate!r} would give a width {most:,} positions", code="argument")
        choice = {a: [j % a.size for j in range(n)] for a, n in sizes.items() if n > a.size}
        return _Growth(
            state(model), twin, example, solution, demand, chosen, choice, find_readers(solution), rate, mode
        )

    def of(steps: Sequence[Step], which: Collection[Atom]) -> list[axes.Axis]:
        """Return the atoms of these widths along axes of these steps of the trace."""
        raw_atoms = {raw for step in steps for axis in step.axes() for raw in axes.atoms(axis)}
        return [raw for raw in raw_atoms if current.solution.axis_of(raw) in which]

    current = attempt()
    for atom in current.chosen.sliced:
        if atom.order:
            whole.update(dict.fromkeys(of(trace.steps, {atom}), role(f"its order matters: {atom.order}")))
    multiplied = role("two computed tensors are multiplied and summed along it")
    for number, atom in current.readers.computed:
        if atom in current.choice:
            whole.update(dict.fromkeys(of([trace.steps[number]], {atom}), multiplied))
    current = attempt()
    for _ in range(_MOST_LEFT):
        if isinstance(current.outcome, Plan):
            return current
        number, why = current.outcome
        modules = alike(twin, trace.steps[number].module)
        stuck_atoms = (
            of(same_code(twin, trace.steps, number), current.choice.keys())
            # If nothing grows at that step, an attribute does not fit widths that grow in its module or in its layers.
            or of([step for step in trace.steps if step.module in modules], current.choice.keys())
            or of([s for s in trace.steps if any(m and is_inside(s.module, m) for m in modules)], current.choice.keys())
        )
        if not stuck_atoms:
            raise SurgeryError(f"{type(model).__name__} cannot grow: {why.text}: give keep=[...]", code="run")
        whole.update(dict.fromkeys(stuck_atoms, why))
        current = attempt()
    raise SurgeryError(
        f"{type(model).__name__} computes something else, or does not run, in more than {_MOST_LEFT} places "
        f"of its code. {list_whole(model, current.whole, 'grow')}\nLeave these modules, and those that "
        "share widths with them, as they are with keep=[...]",
        code="run",
    )


def _add_noise(wide: nn.Module, growth: _Growth, noise: float, generator: torch.Generator | None) -> None:
    """Add noise where matrices and kernels make new positions."""
    old = {name: tensor.std().item() for name, tensor in growth.values.items() if tensor.is_floating_point()}
    values = state(wide)
    held = names_by_id(growth.model)
    for key, tensor in named_tensors(growth.model):
        name = held.pop(id(tensor), None)
        if name not in old or tensor.ndim < 2:
            continue
        new = torch.zeros(values[name].shape, dtype=torch.bool)
        for axis, along in enumerate(growth.solution.tensors[key]):
            made_widths = growth.choice.keys() - growth.readers.of.get((key, axis), set())
            copies = compute_shares(along, made_widths, growth.choice, "zero") == 0
            new |= copies.view([-1 if i == axis else 1 for i in range(new.ndim)])
        normal = torch.randn(values[name].shape, generator=generator) * noise * old[name]
        values[name].add_(torch.where(new, normal, 0).to(values[name]))


def _invert_plan(model: nn.Module, wide: nn.Module, plan: Plan) -> Plan:
    """Return the plan of the model as the first positions of the wide one."""

    @cache  # many tensors lie along one width
    def first_along(runs: Ranges, size: int) -> Ranges:
        places: dict[int, int] = {}
        for place, position in enumerate(positions(runs)):
            places.setdefault(position, place)
        return as_runs(places[position] for position in range(size))

    def first(index: Index, shape: tuple[int, ...]) -> Index:
        """For each old position the first one that repeats it."""
        return tuple(None if runs is None else first_along(runs, size) for runs, size in zip(index, shape))

    entries = {n: (Source(n, first(s[0].index, plan.shapes[n])),) for n, s in plan.entries.items()}
    edits: list[Mapping[str, Any]] = []
    for edit in reversed(plan.edits):
        old = attribute_of(model, edit["module"], edit["attribute"])
        if edit["do"] == "set":
            edits.append({**edit, "value": list(old) if isinstance(old, tuple) else old})
        else:
            edits.append({**edit, "index": first(as_index(edit["index"]), tuple(old.shape))})
    return Plan(entries, plan.small_shapes, tuple(edits), structure(wide), plan.dtypes)
