"""The search for a choice of positions with which the narrow model runs as the algebra of axes predicts."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import SurgeryError, first_line
from surgery.forward import copied, tensors_in
from surgery.plan import Submodel
from surgery.states import state
from surgery.width.axes import SHUFFLED, fix
from surgery.width.choose import choose
from surgery.width.cost import Cost
from surgery.width.couple import Coupling, couple, couplings
from surgery.width.demand import Demand
from surgery.width.plan import plan_of
from surgery.width.repair import Stuck, repaired, splits_interleaved
from surgery.width.scores import Followed, Scores, best, named_widths, scores_of
from surgery.width.solved import Atom, Axes, Axis, atoms, digits, size_of, solve
from surgery.width.target import CLOSE, Target, Unreachable, numbers_kept
from surgery.width.trace import Step, Trace, traced
from surgery.width.unchanged import repeated
from surgery.width.whole import Whole, stayed_whole, told, too_wide, untouched
from surgery.width.why import Why, lost, role

_PATIENCE = 6  # couplings that are tried to bring the narrow model further
_MOST_LEFT = 8  # operations around which widths are left whole because the narrow model does not run


class Search:
    """The search for a choice of positions with which the narrow model runs as predicted."""

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        demand: Demand,
        output: Callable[[Any], Any] | None,
        strict: bool,
        target: Target | None = None,
        scores: Scores | None = None,
    ):
        self.model, self.given, self.asked, self.output, self.strict = model, example, demand, output, strict
        self.target, self.scores = target, scores
        self.values = state(model)
        self.left: dict[tuple[int, int | None], Why] = {}  # by step why one of its axes (None: all) stays whole
        self.coupled: list[Coupling] = []
        self.trace_anew()

    def trace_anew(self) -> None:
        """Trace the model, note what was found to stay whole and to be one width, and choose."""
        self.trace, self.ghost, self.example, *_ = traced(self.model, self.given, self.output)
        self.followed = None if self.scores is None else Followed(self.trace, self.scores)
        for (first, position), why in self.left.items():
            for step in same_code(self.ghost, self.trace.steps, first):
                for axis in step.axes() if position is None else [step.axes()[position]]:
                    fix(axis, why)
        for coupling in self.coupled:
            couple(self.trace, coupling)
        self.solve()

    def whole(self) -> list[Whole]:
        """The hidden widths that stay whole although they were to shrink."""
        return stayed_whole(self.solution, self.demand, self.chosen)

    def too_wide(self, small: nn.Module) -> str:
        """Which tensors of the narrow model are longer along an axis than the rate asks for."""
        return too_wide(self.solution, self.demand, self.chosen, small)

    def untouched(self, small: nn.Module) -> str:
        """Which tensors of the narrow model no pass has used though they may belong to a width that shrinks."""
        return untouched(self.solution, self.demand, self.chosen, small, self.trace.untrained)

    def solve(self) -> None:
        """Solve the trace, and choose."""
        self.solution = solution = solve(self.trace)
        self.demand, score = self.asked, None
        if self.followed:
            scores = self.followed(solution)
            score = partial(scores_of, scores=scores, solution=solution)
            self.demand = replace(self.demand, pick=best(score))
        if self.target:
            self.cost = Cost(self.ghost, solution, self.target.what, self.steps_of_first_pass())
            numbers = partial(numbers_kept, self.target, self.cost, rounded=self.demand.share, scores=score)
            self.demand = replace(self.demand, numbers=numbers)
        try:
            self.chosen = choose(solution, self.demand)
        except Unreachable as error:
            whole = stayed_whole(solution, self.asked, choose(solution, self.asked))
            raise SurgeryError(f"{error}; {told(self.model, whole)}" if whole else str(error)) from None

    def steps_of_first_pass(self) -> int:
        """How many steps the forward pass in evaluation mode has; one in training mode may follow."""
        once = len(self.trace.modes) == 1
        return len((self.trace if once else Trace(clone(self.ghost), copied(self.example), output=self.output)).steps)

    def missed(self) -> str:
        """How far the target was missed; "" if it was not."""
        if not self.target:
            return ""
        share = self.cost(self.chosen.choice) / max(self.cost.full, 1)
        if abs(share - self.target.share) <= CLOSE * self.target.share:
            return ""
        return (
            f"{self.target} is missed by more than {CLOSE:.0%}: {share:.1%} of the {self.target.what} are left, and "
            "one more position of a width, or one more step of `rounding`, would be too much"
        )

    def plan(self) -> Submodel:
        """The plan of a narrow model that runs as predicted.

        Where it does something else, code may take one width for another of the same size: two such become one if the
        narrow model then runs further. If no two do, the widths around it stay whole.
        """
        outcome = first = self.attempt()
        while isinstance(outcome, Stuck):
            further = self.coupled_further(outcome) or self.other_digit(outcome)
            outcome = further or self.left_whole(outcome, first.message)
        self.compare_constants(outcome)
        return outcome

    def compare_constants(self, plan: Submodel) -> None:
        """Note in `others` constants of the code along a width whose kept positions are others in the narrow model.

        Raises:
            SurgeryError: if such constants lie along heads that are dropped, or other numbers are used there.
        """
        choice, axis_of, self.others = self.chosen.choice, self.solution.axis_of, []
        heads, what = {atom for atom in choice if atom.grouping == "heads"}, ""
        small = Trace(plan.build(self.ghost), copied(self.example), self.trace.modes, self.output) if heads else None
        for old, new in zip(self.solution.steps, small.steps) if small else ():
            plain = {key: value for key, value in old.scalars.items() if key not in old.numbers}
            if heads & among(old.axes()) and any(new.scalars.get(key) != value for key, value in plain.items()):
                what = f"computes with other numbers ({old.name} in {old.module or 'the model itself'}) for fewer heads"
        looked: dict[int, tuple[Axes, set[Atom]]] = {}  # by place of a constant its axes, and the widths to look at
        for place, (constant, along, results) in enumerate(self.trace.constants):
            axes = tuple(map(axis_of, along))
            cut = choice.keys() & among(axes)
            if constant.numel() == 1:
                cut = heads & among([axis_of(axis) for found in results for axis in found])
            if cut & heads or any(atom.order for atom in cut):
                looked[place] = axes, cut
        (full, small), unknown = self.constants_of_both(plan) if looked else (([], []), "")
        for place, (axes, cut) in looked.items():
            if not unknown and close(repeated(full[place][0], axes, choice), small[place][0]):
                continue
            if cut & heads and (axes or not unknown):
                what = "makes constants for each head (slopes of positions, say), which are others with fewer heads"
                what += f", or not known ({unknown})" if unknown else ""
            elif not unknown:
                self.others += [name for name, atom in named_widths(self.solution).items() if atom in cut]
        if what:
            raise SurgeryError(
                f"{type(self.model).__name__} {what}: the heads that stay would not do what they did. Take "
                "heads='inside', or register what is computed from their number as a buffer of its module"
            )

    def told_others(self) -> str:
        """Along which widths constants of the code are others in the narrow model; "" if there are none."""
        if not self.others:
            return ""
        where = ", ".join(dict.fromkeys(self.others))
        return (
            f"{type(self.model).__name__} makes constants whose numbers depend on how many there are (linspace, say) "
            f"along {where}: the narrow model's are not the first of the full one's, so it does not compute what these "
            "positions do there. Register the constants as a buffer of their module, or keep=[...] the width whole"
        )

    def constants_of_both(self, plan: Submodel) -> tuple[tuple[list, list], str]:
        """The constants of passes of both models where these are; or why their numbers are not known."""
        if any(tensor.is_meta for tensor in (*self.values.values(), *tensors_in(self.given))):
            return ([], []), "meta device"
        try:
            full, small = (
                Trace(copy, copied(self.given), self.trace.modes, self.output).constants
                for copy in (clone(self.model), plan.build(self.model))
            )
        except Exception as error:  # whatever the code raises there
            return ([], []), first_line(error)
        if not len(full) == len(small) == len(self.trace.constants):
            return ([], []), "the code makes others on the meta device"
        return (full, small), ""

    def attempt(self) -> Submodel | Stuck:
        """What comes of the present choice."""
        choice = self.chosen.choice
        base = plan_of(self.ghost, self.values, self.solution, choice)
        return repaired(self.ghost, base, self.solution, choice, self.example)

    def coupled_further(self, stuck: Stuck) -> Submodel | Stuck | None:
        """What comes of the first coupling with which the narrow model runs further; None if there is none."""
        before = len(self.whole())
        found = list(islice(couplings(self.trace, self.solution, stuck.step, self.chosen.choice), _PATIENCE))
        for coupling in found:
            self.coupled.append(coupling)
            self.trace_anew()
            if self.chosen.choice and len(self.whole()) <= before:
                outcome = self.attempt()
                if isinstance(outcome, Submodel) or outcome.step > stuck.step:
                    return outcome
            self.coupled.pop()
        if found:
            self.trace_anew()
        return None

    def other_digit(self, stuck: Stuck) -> Submodel | Stuck | None:
        """What comes of it if of a width that the step splits into digits another one shrinks; None if none can."""
        step = self.solution.steps[stuck.step]
        given = [axis for found in step.inputs for axis in found]
        smaller = [i for i, axis in enumerate(given) if size_of(axis, self.chosen.choice) < axis.size]
        before = len(self.whole())
        for position, axis in enumerate(step.axes()):
            if axis not in self.chosen.choice or not any(axis in digits(whole) for whole in given if whole is not axis):
                continue
            self.left[stuck.step, position] = lost(f"the code there does not run with fewer: {stuck.difference}")
            self.trace_anew()
            now = self.solution.steps[stuck.step].axes()
            if len(self.whole()) <= before and all(size_of(now[i], self.chosen.choice) < now[i].size for i in smaller):
                outcome = self.attempt()
                if isinstance(outcome, Submodel) or outcome.step > stuck.step:
                    return outcome
            del self.left[stuck.step, position]
            self.trace_anew()
        return None

    def left_whole(self, stuck: Stuck, message: str) -> Submodel | Stuck:
        """What comes of it if the widths around the step stay whole; SurgeryError with this message if none is left."""
        if self.strict or (stuck.step, None) in self.left or len(self.left) == _MOST_LEFT:
            raise SurgeryError(message)
        if splits_interleaved(self.solution.steps[stuck.step]):
            self.left[stuck.step, None] = role(SHUFFLED)
        else:
            self.left[stuck.step, None] = lost(f"the code there does not run with fewer: {stuck.difference}")
        self.trace_anew()
        if not self.chosen.choice:
            raise SurgeryError(message)
        return self.attempt()


def among(axes: Iterable[Axis]) -> set[Atom]:
    """The atoms of some axes."""
    return {atom for axis in axes for atom in atoms(axis)}


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same numbers but for rounding."""
    exact = torch.promote_types(a.dtype, torch.float64)
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.allclose(a.to(exact), b.to(exact), equal_nan=True)


def same_code(model: nn.Module, steps: Sequence[Step], number: int) -> list[Step]:
    """The operations at the place in the code of its module where a step is, in all modules of that class."""
    modules, calls, places = dict(model.named_modules()), Counter(), []
    for one in steps:
        places.append((type(modules[one.module]), calls[one.module], one.name))
        calls[one.module] += 1
    return [one for one, place in zip(steps, places) if place == places[number]]
