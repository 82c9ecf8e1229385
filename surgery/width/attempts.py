"""Attempts to make a model narrower, until one runs as predicted.

Each traces the model, solves the trace, chooses positions, makes the plan of them and checks the model that it builds,
all with what is known by then. If the narrow model does not do what was predicted, that shows what the trace could not
show: the code takes two widths of one size for one width, or needs all positions there. The next attempt starts from
that knowledge. All values are immutable.
"""

import gc
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.forward import Observed, pause_collector
from surgery.names import is_inside, join
from surgery.plan import Plan
from surgery.states import state
from surgery.width import axes
from surgery.width.axes import SHUFFLED, Why, fix, lost, role
from surgery.width.check import CheckedPlan, Divergence, check_plan, splits_interleaved, with_configuration
from surgery.width.choose import Chosen, Demand, Scores, TracedScores, best, choose, scores_of
from surgery.width.plan import plan_of
from surgery.width.positions import Positions, TracedPositions
from surgery.width.scales import held_numbers
from surgery.width.shortfall import UnshrunkWidth, find_whole
from surgery.width.solve import Atom, Solution, digits, is_whole, size_of, solve
from surgery.width.steps import alike, number_steps, same_code
from surgery.width.trace import Trace, trace_model

_COUPLINGS = 6  # the most couplings that are tried for one step at which the narrow model is stuck
_MOST_WHOLE = 8  # the most operations around which widths keep their size because the narrow model does not run


class StepAxis(NamedTuple):
    """An axis of a trace: the number of a step, and of the axis among that step's."""

    step: int
    position: int


Coupling: TypeAlias = tuple[tuple[StepAxis, StepAxis], ...]  # pairs of axes that become one width


Numbers: TypeAlias = Callable[[Collection[Atom]], Mapping[Atom, int]]
"""From the widths that may shrink to how many positions of each stay."""

Sizing: TypeAlias = Callable[[Observed[Trace], Solution, Demand, Callable[[Atom], Tensor] | None], Numbers]
"""(traced model, its axes, the demand, scores of a width or None) -> `Numbers`."""


class Unreachable(SurgeryError):
    """A model as small as asked for would need widths below what they may shrink to."""


@dataclass(frozen=True)
class NarrowRequest:
    """The arguments of `surgery.narrow`.

    Attributes:
        sizing: decides how many positions of each width stay, if that is not the demand's share. It raises Unreachable
            if no numbers are small enough.
    """

    model: nn.Module
    example: Any
    demand: Demand
    output: Callable[[Any], Any] | None = None
    strict: bool = False
    scores: Scores | None = None
    sizing: Sizing | None = None
    positions: Positions | None = None


@dataclass(frozen=True)
class Constraints:
    """The findings of earlier attempts.

    Attributes:
        couplings: axes that are one width for the code.
        whole: by number of a step and of one of its axes (None: all), why these axes keep their size there.
    """

    couplings: tuple[Coupling, ...] = ()
    whole: Mapping[tuple[int, int | None], Why] = field(default_factory=dict)


@dataclass(frozen=True)
class Attempt:
    """A choice of positions, what it was made from, and what comes of it.

    Attributes:
        request: the arguments of `surgery.narrow` that it was made for.
        known: the findings of earlier attempts.
        seen: the trace, with the model and example that were traced: on the meta device, if the model runs there.
        solution: the axes of the trace.
        demand: what was asked of them.
        chosen: the positions that stay.
    """

    request: NarrowRequest
    known: Constraints
    seen: Observed[Trace]
    solution: Solution
    demand: Demand
    chosen: Chosen

    @cached_property
    def whole(self) -> list[UnshrunkWidth]:
        """The hidden widths that keep their size although they were to shrink."""
        return find_whole(self.solution, self.demand, self.chosen)

    @cached_property
    @pause_collector()
    def outcome(self) -> CheckedPlan | Divergence:
        """The plan, if the narrow model runs as predicted; otherwise how far it runs."""
        choice = self.chosen.choice
        plan = plan_of(self.seen.model, state(self.request.model), self.solution, choice)
        held = held_numbers(self.request.model)
        return check_plan(self.seen.model, plan, self.solution, choice, self.seen.example, held)

    @property
    def checked(self) -> CheckedPlan:
        """The plan of an attempt that runs as predicted."""
        assert isinstance(self.outcome, CheckedPlan)
        return self.outcome

    @property
    def plan(self) -> Plan:
        """The checked plan, with the new widths in the model's configuration if it can."""
        return self._configured[0]

    @property
    def configuration_problem(self) -> str:
        """The reason why the configuration cannot hold the new widths; "" without one."""
        return self._configured[1]

    @cached_property
    def _configured(self) -> tuple[Plan, str]:
        seen = self.seen
        return with_configuration(seen.model, self.checked.plan, self.solution, self.chosen.choice, seen.example)

    def is_further_than(self, other: "Attempt") -> bool:
        """Return whether the narrow model runs further, with no more whole widths."""
        if not self.chosen.choice or len(self.whole) > len(other.whole):
            return False
        return isinstance(self.outcome, CheckedPlan) or self.outcome.step > other.outcome.step


def find_last_attempt(request: NarrowRequest) -> Attempt:
    """Return the attempt with a narrow model that runs as predicted.

    Raises SurgeryError as `iterate_attempts` does.
    """
    try:
        return deque(iterate_attempts(request), maxlen=1).pop()
    except Unreachable as error:
        raise SurgeryError(str(error), code="target") from None


def iterate_attempts(request: NarrowRequest, known: Constraints = Constraints()) -> Iterator[Attempt]:
    """Yield attempts, each further than the last, until one runs as predicted.

    If no coupling and no other digit brings it further, the widths around the operation where it is stuck keep their
    size.

    Raises:
        SurgeryError: if a target cannot be reached, and if the narrow model does not run whatever is tried.
    """
    current = make_attempt(request, known)
    yield current
    message = current.outcome.message if isinstance(current.outcome, Divergence) else ""
    while isinstance(stuck := current.outcome, Divergence):
        gc.collect(1)  # copies of the model that earlier attempts have left
        further = _find_further(current, stuck)
        if further is None:
            known = _with_whole(current, stuck, None)
            if known == current.known:  # these keep their size already, so all widths of the module do
                known = _with_whole(current, stuck, None, everywhere=True)
            if request.strict or known == current.known or len(current.known.whole) >= _MOST_WHOLE:
                raise SurgeryError(message, code="run")
            further = make_attempt(request, known)
        current = further
        yield current
        if not current.chosen.choice:
            raise SurgeryError(message, code="run")


@pause_collector()
def make_attempt(request: NarrowRequest, known: Constraints) -> Attempt:
    """Trace the model, solve the trace with what is known, and choose."""
    seen = trace_model(request.model, request.example, request.output)
    trace = seen.found
    traced_scores = None if request.scores is None else TracedScores(trace, request.scores)
    traced_positions = None if request.positions is None else TracedPositions(trace, request.positions)
    for (first, position), why in known.whole.items():
        for step in same_code(seen.model, trace.steps, first):
            for axis in step.axes() if position is None else [step.axes()[position]]:
                fix(axis, why)
    for a, b in (pair for coupling in known.couplings for pair in coupling):
        axes.unify(*(trace.steps[place.step].axes()[place.position] for place in (a, b)))
    solution = solve(trace)
    demand, score = request.demand.along(solution), None
    if traced_scores:
        score = partial(scores_of, scores=traced_scores(solution), solution=solution)
        demand = replace(demand, pick=best(score))
    if traced_positions:
        demand = replace(demand, choice=traced_positions(solution))
    if request.sizing:
        demand = replace(demand, numbers=request.sizing(seen, solution, request.demand, score))
    return Attempt(request, known, seen, solution, demand, choose(solution, demand))


def _find_further(current: Attempt, stuck: Divergence) -> Attempt | None:
    """Return the first attempt that gets further.

    It takes two widths as one, or shrinks another digit of a width.
    """
    known, module = current.known, current.solution.steps[stuck.step].module
    proposals = islice(_propose_couplings(current, stuck.step), _COUPLINGS)
    couplings = [
        variant
        for coupling in proposals
        for variant in dict.fromkeys((_repeat_coupling(current, module, coupling), coupling))
    ]
    for further in (replace(known, couplings=(*known.couplings, coupling)) for coupling in couplings):
        try:
            trial = make_attempt(current.request, further)
        except Unreachable:  # with these widths as one; another way may still reach it
            continue
        if trial.is_further_than(current):
            return trial
    step, choice = current.solution.steps[stuck.step], current.chosen.choice
    inputs = [axis for tensor_axes in step.inputs for axis in tensor_axes]
    smaller = [i for i, axis in enumerate(inputs) if size_of(axis, choice) < axis.size]
    for position, axis in enumerate(step.axes()):
        if axis in choice and any(axis in digits(other) for other in inputs if other is not axis):
            trial = make_attempt(current.request, _with_whole(current, stuck, position))
            now = trial.solution.steps[stuck.step].axes()
            shrinks = all(size_of(now[i], trial.chosen.choice) < now[i].size for i in smaller)
            if shrinks and trial.is_further_than(current):
                return trial
    return None


def _propose_couplings(current: Attempt, number: int) -> Iterator[Coupling]:
    """Yield axes of one size in a step's module that shrink differently.

    The module's code may take them for one width. First the step's own axes with others, the shortest first (a head's
    share of queries and of values). Then all axes of the module, the longest first (a head's share computed from the
    input's channels): two axes of one size, and then all axes of this size together.
    """
    step, choice = current.solution.steps[number], current.chosen.choice
    places: dict[int, dict[int, StepAxis]] = {}  # by size and new size the first axis that may shrink
    for i, other in enumerate(current.solution.steps):
        if is_inside(other.module, step.module):
            for position, axis in enumerate(other.axes()):
                if not is_whole(axis):
                    places.setdefault(axis.size, {}).setdefault(size_of(axis, choice), StepAxis(i, position))
    new_sizes = {axis.size: size_of(axis, choice) for axis in step.axes() if not is_whole(axis)}
    for size in sorted(new_sizes):
        first = places[size][new_sizes[size]]
        yield from (((first, other),) for new, other in places[size].items() if new != new_sizes[size])
    for size in sorted(places, reverse=True):
        first, *others = places[size].values()
        if others:
            yield ((first, others[0]),)
            if len(others) > 1:
                yield tuple((first, other) for other in others)


def _repeat_coupling(current: Attempt, module: str, coupling: Coupling) -> Coupling:
    """Return a coupling that a module needs, in all modules with its code.

    Where widths compete, two widths may have equal sizes in another module only by chance, and unequal ones in the next
    attempt. So all such modules get the coupling at once.
    """
    steps = current.solution.steps
    numbers = number_steps(steps)
    names = [*numbers]

    def move(place: StepAxis, other: str) -> tuple[StepAxis, int] | None:
        """Return a place in another module and its axis's length; None if it is whole."""
        around, call, name = names[place.step]
        inside = around[len(module) :].removeprefix(".")
        number = numbers.get((join(other, inside) if inside else other, call, name))
        axes_there = [] if number is None else steps[number].axes()[place.position :]
        if number is None or not axes_there or is_whole(axes_there[0]):
            return None
        return StepAxis(number, place.position), axes_there[0].size

    pairs = [*coupling]
    for other in alike(current.seen.model, module):
        for pair in coupling if other != module else ():
            a, b = (move(place, other) for place in pair)
            if a and b and a[1] == b[1]:
                pairs.append((a[0], b[0]))
    return tuple(pairs)


def _with_whole(current: Attempt, stuck: Divergence, position: int | None, everywhere: bool = False) -> Constraints:
    """Return constraints that also keep an axis of the stuck step, or all its axes.

    With `everywhere` they also keep the axes of all other steps of its module, unless that is the model itself.
    """
    steps, whole = current.solution.steps, current.known.whole
    why = lost(f"the code there does not run with fewer: {stuck.difference}")
    if position is None and splits_interleaved(steps[stuck.step]):
        why = role(SHUFFLED)
    module = steps[stuck.step].module
    numbers = [n for n, step in enumerate(steps) if everywhere and module and step.module == module]
    additions = {(number, position): why for number in [stuck.step, *numbers] if (number, position) not in whole}
    return replace(current.known, whole={**whole, **additions})
