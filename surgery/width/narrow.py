"""Width slicing: a narrower network that keeps the first, or the best, positions of every hidden width."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from torch import nn

from surgery.deprecated import formerly, warn_of
from surgery.errors import SurgeryError
from surgery.forward import ghost_of
from surgery.states import state
from surgery.submodel import Submodel
from surgery.width.axes import fix
from surgery.width.choose import choose
from surgery.width.corner import corner
from surgery.width.cost import Cost
from surgery.width.couple import Coupling, couple, couplings
from surgery.width.demand import Demand, Heads, Rounding, checked
from surgery.width.plan import plan_of
from surgery.width.repair import Stuck, repaired
from surgery.width.scores import Followed, Scores, best, scores_of
from surgery.width.solved import solve
from surgery.width.target import CLOSE, Target, Unreachable, numbers_kept
from surgery.width.trace import Step, Trace, traced
from surgery.width.whole import Whole, stayed_whole
from surgery.width.why import Why, lost

_PATIENCE = 6  # couplings that are tried to bring the narrow model further
_MOST_LEFT = 8  # operations around which widths are left whole because the narrow model does not run
_TOLD = 5  # widths that stayed whole are listed up to this number

_log = logging.getLogger(__name__)


@formerly("model rate example")
def narrow(
    model: nn.Module,
    *,
    rate: float | None = None,
    example: Any = None,
    rates: Mapping[str, float] | None = None,
    target: Target | None = None,
    keep_top: Scores | None = None,
    keep: Sequence[str] = (),
    output: Callable[[Any], Any] | None = None,
    heads: Heads = "inside",
    rounding: Rounding = math.ceil,
    strict: bool = False,
    like: nn.Module | None = None,
) -> tuple[nn.Module, Submodel]:
    """A narrower copy of any module: the first, or the best, ceil(rate * C) positions of every hidden width C.

    One forward pass in evaluation mode shows which axes of which tensors are one width; another compares every
    operation of the narrow model with what the algebra of axes predicts, so that no wrong model is returned. Both
    run on the meta device if the model can, so that they cost little.

    Args:
        model: any module; it is not changed.
        rate: in (0, 1]; needed, unless `rates` (it is then 1) or a `target` are given.
        example: an input: a tensor, a tuple of arguments or a dict of keyword arguments; needed. Its axes, and those of
            the output (classes), stay whole; so does everything that the forward pass does not use.
        rates: other rates for the widths that modules of these names make: `{"layer1": 0.5, "*.mlp.fc1": 0.25}`. A
            pattern matches a module's name or that of one around it; `*`, `?` and `[...]` are as in file names. The
            first pattern that matches counts.
        target: how large the narrow model may be, `Target(macs=0.5)`, in place of rates. With `keep_top` the positions
            of all widths compete for staying.
        keep_top: scores by width, as `surgery.importance` gives them: those with the highest stay, in their order; of
            equal ones the first. A width over which a window or a range runs keeps its first positions all the same.
        keep: such patterns of modules whose tensors stay whole.
        output: what of the output has to keep its shape: `lambda y: y.logits` for a model that also returns its hidden
            states.
        heads: `inside` keeps all heads of an attention and slices inside each of them; `drop` keeps the first heads.
        rounding: from rate * C to the number of positions kept, which is at least one and at most C. `zoo.divisor8`
            gives multiples of 8.
        strict: whether a hidden width that stays whole, although it was to shrink, is an error. Otherwise such widths
            are logged as a warning with the reasons, and an error only if nothing shrinks.
        like: deprecated; use `corner`.

    Returns:
        The narrow module, and the plan that maps its state to the model's.

    Raises:
        SurgeryError: if no hidden width can shrink, or with `strict` not all of them (a model that has none is copied);
            if a pattern matches no module, or decides nothing; if modules that make one width are to have different
            rates; if the target cannot be reached, with `strict` also if whole positions miss it by more than 2 %,
            which otherwise is logged as a warning; for scores of another model, and if there are none for a width that
            is to shrink.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 5))
    >>> small, plan = narrow(net, rate=0.5, example=torch.zeros(2, 3, 4, 4))
    >>> small[0], small[3]
    (Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1)), Linear(in_features=16, out_features=5, bias=True))
    >>> torch.equal(plan.extract(state(net))["0.weight"], net[0].weight[:4])
    True
    """
    if like is not None and rate is None:
        warn_of("narrow(model, like=small)", "corner(model, small)")
        return corner(model, like)
    if like is not None or (rate is None and not rates and target is None):
        raise SurgeryError("narrow takes a rate and an example; to copy the widths of a smaller model use corner")
    if target is not None and (rate is not None or rates):
        raise SurgeryError("a target says how large the model is, so it replaces rate and rates: give one of them")
    if target is not None and not isinstance(target, Target):
        raise SurgeryError(f"target is surgery.Target(macs=...) or surgery.Target(parameters=...), got {target!r}")
    if target is not None:
        rate = target.rate
    if example is None:
        raise SurgeryError("narrow runs one forward pass: give an input as `example`")
    demand = checked(model, Demand(1.0 if rate is None else rate, rates or {}, keep, heads, rounding))
    search = _Search(model, example, demand, output, strict, target, keep_top)
    plan = search.plan()
    if missed := search.missed():
        if strict:
            raise SurgeryError(missed)
        _log.warning(missed)
    if whole := search.whole():
        if strict or not search.chosen.choice:
            raise SurgeryError(_told(model, whole))
        _log.warning(_told(model, whole))
    return plan.build(model), plan


def _told(model: nn.Module, whole: Sequence[Whole]) -> str:
    """Which widths stay whole, and why."""
    lines = [f"  {width}" for width in whole[:_TOLD]]
    if len(whole) > _TOLD:
        lines.append(f"  and {len(whole) - _TOLD} more; surgery.widths lists all")
    some = f"{len(whole)} hidden widths" if len(whole) > 1 else "a hidden width"
    return "\n".join([f"{some} of {type(model).__name__} cannot shrink:", *lines])


class _Search:
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
        self.left: dict[int, Why] = {}  # by step why the axes that it sees stay whole
        self.coupled: list[Coupling] = []
        self.trace_anew()

    def trace_anew(self) -> None:
        """Trace the model, note what was found to stay whole and to be one width, and choose."""
        self.trace, self.ghost, self.example, *_ = traced(self.model, self.given, self.output)
        self.followed = None if self.scores is None else Followed(self.trace, self.scores)
        for first, why in self.left.items():
            for step in self.same_code(first):
                for axis in step.axes():
                    fix(axis, why)
        for coupling in self.coupled:
            couple(self.trace, coupling)
        self.solve()

    def same_code(self, step: int) -> list[Step]:
        """The operations at this place of the code of the step's module, in all modules of its class."""
        modules, calls, places = dict(self.ghost.named_modules()), Counter(), []
        for one in self.trace.steps:
            places.append((type(modules[one.module]), calls[one.module], one.name))
            calls[one.module] += 1
        return [one for one, place in zip(self.trace.steps, places) if place == places[step]]

    def whole(self) -> list[Whole]:
        """The hidden widths that stay whole although they were to shrink."""
        return stayed_whole(self.solution, self.demand, self.chosen)

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
            raise SurgeryError(f"{error}; {_told(self.model, whole)}" if whole else str(error)) from None

    def steps_of_first_pass(self) -> int:
        """How many steps the forward pass in evaluation mode has; one in training mode may follow."""
        once = len(self.trace.modes) == 1
        return len((self.trace if once else Trace(ghost_of(self.model), self.example, output=self.output)).steps)

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
        outcome = self.attempt()
        while isinstance(outcome, Stuck):
            outcome = self.coupled_further(outcome) or self.left_whole(outcome)
        return outcome

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

    def left_whole(self, stuck: Stuck) -> Submodel | Stuck:
        """What comes of it if the widths around the step stay whole."""
        if self.strict or stuck.step in self.left or len(self.left) == _MOST_LEFT:
            raise SurgeryError(stuck.message)
        self.left[stuck.step] = lost(f"the code there does not run with fewer: {stuck.difference}")
        self.trace_anew()
        if not self.chosen.choice:
            raise SurgeryError(stuck.message)
        return self.attempt()
