"""The search for a narrow model that runs as the algebra of axes predicts: a row of attempts.

An attempt traces the model, solves the trace, chooses positions, makes the plan of them and checks the model that it
builds, all with what is known by then. Where the narrow model does something else, that shows what the trace did not:
code takes two widths of one size for one, or cannot do with fewer positions there. The next attempt begins anew with
that. No value changes once it is made.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import SurgeryError, first_line
from surgery.forward import copied, tensors_in
from surgery.names import is_inside
from surgery.plan import Submodel
from surgery.states import state
from surgery.width import axes
from surgery.width.axes import SHUFFLED, Why, fix, lost, role
from surgery.width.check import Stuck, checked_plan, plan_of, splits_interleaved
from surgery.width.choose import Chosen, Demand, Scores, TracedScores, best, choose, scores_of
from surgery.width.shortfall import UnshrunkWidth, listed, stayed_whole
from surgery.width.solved import (
    Atom,
    Axes,
    Axis,
    Solution,
    atoms,
    digits,
    is_whole,
    named_widths,
    repeated,
    size_of,
    solve,
)
from surgery.width.target import Cost, Target, numbers_kept
from surgery.width.trace import Step, Trace, traced

_COUPLINGS = 6  # that are tried to bring the narrow model further
_MOST_WHOLE = 8  # operations around which widths stay whole because the narrow model does not run


class Place(NamedTuple):
    """An axis of a trace: the number of a step, and of the axis among that step's."""

    step: int
    position: int


Coupling: TypeAlias = tuple[tuple[Place, Place], ...]  # pairs of axes that become one width


@dataclass(frozen=True)
class Request:
    """What is wanted: the arguments of `surgery.narrow`."""

    model: nn.Module
    example: Any
    demand: Demand
    output: Callable[[Any], Any] | None = None
    strict: bool = False
    target: Target | None = None
    scores: Scores | None = None


@dataclass(frozen=True)
class Known:
    """What earlier attempts have found out.

    Attributes:
        couplings: axes that are one width for the code.
        whole: by number of a step, and of one of its axes (None: all), why they stay whole there.
    """

    couplings: tuple[Coupling, ...] = ()
    whole: Mapping[tuple[int, int | None], Why] = field(default_factory=dict)


@dataclass(frozen=True)
class Attempt:
    """A choice of positions, what it was made from, and what comes of it.

    Attributes:
        request, known: what it was made for, with what was known.
        trace, model, example: the trace, and what was traced: copies on the meta device, if the model runs there.
        solution, demand, chosen: the axes, what was asked of them, and the positions.
        cost: counts what is left, if there is a target.
    """

    request: Request
    known: Known
    trace: Trace
    model: nn.Module
    example: Any
    solution: Solution
    demand: Demand
    chosen: Chosen
    cost: Cost | None

    @cached_property
    def whole(self) -> list[UnshrunkWidth]:
        """The hidden widths that stay whole although they were to shrink."""
        return stayed_whole(self.solution, self.demand, self.chosen)

    @cached_property
    def outcome(self) -> Submodel | Stuck:
        """The plan, if the narrow model runs as predicted; otherwise how far it runs."""
        choice = self.chosen.choice
        plan = plan_of(self.model, state(self.request.model), self.solution, choice)
        return checked_plan(self.model, plan, self.solution, choice, self.example)

    def is_further_than(self, other: "Attempt") -> bool:
        """Whether the narrow model runs further, with no more widths that stay whole."""
        if not self.chosen.choice or len(self.whole) > len(other.whole):
            return False
        return isinstance(self.outcome, Submodel) or self.outcome.step > other.outcome.step


def attempts(request: Request) -> Iterator[Attempt]:
    """Attempts, each further than the one before, until the narrow model runs as predicted.

    If no coupling and no other digit brings it further, the widths around the operation where it is stuck stay whole.

    Raises:
        SurgeryError: if a target cannot be reached, and if the narrow model does not run whatever is tried.
    """
    here = attempt(request, Known())
    yield here
    message = here.outcome.message if isinstance(here.outcome, Stuck) else ""
    while isinstance(stuck := here.outcome, Stuck):
        further = _first_further(here, stuck)
        if further is None:
            if request.strict or (stuck.step, None) in here.known.whole or len(here.known.whole) == _MOST_WHOLE:
                raise SurgeryError(message)
            further = attempt(request, _with_whole(here, stuck, None))
        here = further
        yield here
        if not here.chosen.choice:
            raise SurgeryError(message)


def attempt(request: Request, known: Known) -> Attempt:
    """Trace the model, solve the trace with what is known, and choose."""
    seen = traced(request.model, request.example, request.output)
    trace, target = seen.found, request.target
    traced_scores = None if request.scores is None else TracedScores(trace, request.scores)
    for (first, position), why in known.whole.items():
        for step in same_code(seen.model, trace.steps, first):
            for axis in step.axes() if position is None else [step.axes()[position]]:
                fix(axis, why)
    for a, b in (pair for coupling in known.couplings for pair in coupling):
        axes.unify(*(trace.steps[place.step].axes()[place.position] for place in (a, b)))
    solution = solve(trace)
    demand, score, cost = request.demand, None, None
    if traced_scores:
        score = partial(scores_of, scores=traced_scores(solution), solution=solution)
        demand = replace(demand, pick=best(score))
    if target:
        cost = Cost(seen.model, solution, target.what, trace.lengths[0])
        demand = replace(demand, numbers=partial(numbers_kept, target, cost, rounded=demand.share, scores=score))
    chosen = choose(solution, demand)
    if target and (share := cost.share(chosen.choice)) > target.share:
        whole = stayed_whole(solution, request.demand, choose(solution, request.demand))
        reasons = f"; {listed(request.model, whole)}" if whole else ""
        raise SurgeryError(
            f"{target} cannot be reached: {share:.1%} of the {target.what} are left where every width that can shrink "
            f"is at its floor: take a lower floor, another rounding or a larger share{reasons}"
        )
    return Attempt(request, known, trace, seen.model, seen.example, solution, demand, chosen, cost)


def _first_further(here: Attempt, stuck: Stuck) -> Attempt | None:
    """The first attempt that gets further, of those for which two widths are one, or another digit of one shrinks."""
    for coupling in islice(_couplings(here, stuck.step), _COUPLINGS):
        there = attempt(here.request, replace(here.known, couplings=(*here.known.couplings, coupling)))
        if there.is_further_than(here):
            return there
    step, choice = here.solution.steps[stuck.step], here.chosen.choice
    inputs = [axis for found in step.inputs for axis in found]
    smaller = [i for i, axis in enumerate(inputs) if size_of(axis, choice) < axis.size]
    for position, axis in enumerate(step.axes()):
        if axis in choice and any(axis in digits(other) for other in inputs if other is not axis):
            there = attempt(here.request, _with_whole(here, stuck, position))
            now = there.solution.steps[stuck.step].axes()
            shrinks = all(size_of(now[i], there.chosen.choice) < now[i].size for i in smaller)
            if shrinks and there.is_further_than(here):
                return there
    return None


def _couplings(here: Attempt, number: int) -> Iterator[Coupling]:
    """Axes of one size that shrink differently, of what a step's module sees: its code may take them for one width.

    First those of the step itself with others, the shortest first (a head's share of queries and of values); then the
    longest two (a head's share computed from the input's channels), and all axes that are as long as these.
    """
    step, choice = here.solution.steps[number], here.chosen.choice
    found: dict[int, dict[int, Place]] = {}  # by size and new size the first axis that may shrink
    for i, other in enumerate(here.solution.steps):
        if is_inside(other.module, step.module):
            for position, axis in enumerate(other.axes()):
                if not is_whole(axis):
                    found.setdefault(axis.size, {}).setdefault(size_of(axis, choice), Place(i, position))
    mine = {axis.size: size_of(axis, choice) for axis in step.axes() if not is_whole(axis)}
    for size in sorted(mine):
        first = found[size][mine[size]]
        yield from (((first, other),) for new, other in found[size].items() if new != mine[size])
    for size in sorted(found, reverse=True):
        first, *others = found[size].values()
        if others:
            yield ((first, others[0]),)
            if len(others) > 1:
                yield tuple((first, other) for other in others)


def _with_whole(here: Attempt, stuck: Stuck, position: int | None) -> Known:
    """What is known if an axis of the step where an attempt is stuck stays whole, or all of them."""
    why = lost(f"the code there does not run with fewer: {stuck.difference}")
    if position is None and splits_interleaved(here.solution.steps[stuck.step]):
        why = role(SHUFFLED)
    return replace(here.known, whole={**here.known.whole, (stuck.step, position): why})


def same_code(model: nn.Module, steps: Sequence[Step], number: int) -> list[Step]:
    """The operations at the place in the code of its module where a step is, in all modules of that class."""
    modules, calls, places = dict(model.named_modules()), Counter(), []
    for step in steps:
        places.append((type(modules[step.module]), calls[step.module], step.name))
        calls[step.module] += 1
    return [step for step, place in zip(steps, places) if place == places[number]]


def other_constants(found: Attempt, plan: Submodel) -> list[str]:
    """The widths along which constants of the code are others in the narrow model than the kept ones of the full one.

    Raises:
        SurgeryError: if such constants lie along heads that are dropped, or other numbers are used there.
    """
    request, trace, solution, choice = found.request, found.trace, found.solution, found.chosen.choice
    heads, what, others = {atom for atom in choice if atom.grouping == "heads"}, "", []
    small = Trace(plan.build(found.model), copied(found.example), trace.modes, request.output) if heads else None
    for old, new in zip(solution.steps, small.steps) if small else ():
        plain = {key: value for key, value in old.scalars.items() if key not in old.numbers}
        if heads & _among(old.axes()) and any(new.scalars.get(key) != value for key, value in plain.items()):
            what = f"computes with other numbers ({old.name} in {old.module or 'the model itself'}) for fewer heads"
    compared: dict[int, tuple[Axes, set[Atom]]] = {}  # by place of a constant its axes, and the widths to look at
    for place, (constant, along, results) in enumerate(trace.constants):
        its_axes = tuple(map(solution.axis_of, along))
        cut = choice.keys() & _among(its_axes)
        if constant.numel() == 1:
            cut = heads & _among([solution.axis_of(axis) for result in results for axis in result])
        if cut & heads or any(atom.order for atom in cut):
            compared[place] = its_axes, cut
    (full, narrow), unknown = _constants_of_both(found, plan) if compared else (([], []), "")
    for place, (its_axes, cut) in compared.items():
        if not unknown and _same_numbers(repeated(full[place][0], its_axes, choice), narrow[place][0]):
            continue
        if cut & heads and (its_axes or not unknown):
            what = "makes constants for each head (slopes of positions, say), which are others with fewer heads"
            what += f", or not known ({unknown})" if unknown else ""
        elif not unknown:
            others += [name for name, atom in named_widths(solution).items() if atom in cut]
    if what:
        raise SurgeryError(
            f"{type(request.model).__name__} {what}: the heads that stay would not do what they did. Take "
            "heads='inside', or register what is computed from their number as a buffer of its module"
        )
    return list(dict.fromkeys(others))


def _constants_of_both(found: Attempt, plan: Submodel) -> tuple[tuple[list, list], str]:
    """The constants of passes of both models where these are; or why their numbers are not known."""
    request, trace = found.request, found.trace
    if any(tensor.is_meta for tensor in (*state(request.model).values(), *tensors_in(request.example))):
        return ([], []), "meta device"
    try:
        full, small = (
            Trace(copy, copied(request.example), trace.modes, request.output).constants
            for copy in (clone(request.model), plan.build(request.model))
        )
    except Exception as error:  # whatever the code raises there
        return ([], []), first_line(error)
    if not len(full) == len(small) == len(trace.constants):
        return ([], []), "the code makes others on the meta device"
    return (full, small), ""


def _among(several: Iterable[Axis]) -> set[Atom]:
    """The atoms of some axes."""
    return {atom for axis in several for atom in atoms(axis)}


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers but for rounding."""
    exact = torch.promote_types(a.dtype, torch.float64)
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.allclose(a.to(exact), b.to(exact), equal_nan=True)
