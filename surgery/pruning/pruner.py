"""Pruning in steps: score, cut a little, train, and again."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from numbers import Real
from typing import Any, NamedTuple

from torch import Tensor, nn

from surgery.errors import SurgeryError, explain
from surgery.forward import check_runs
from surgery.plan import Plan
from surgery.pruning.criteria import OF_DATA, Criterion, Name, check_criterion, is_criterion, is_pruner, name_of, takes
from surgery.pruning.criteria import importance as score_widths
from surgery.pruning.target import Cost, Limits, Measure, Target, describe_miss, sizing
from surgery.states import check_same_shapes, shapes_of
from surgery.torch_private import BatchNorm
from surgery.width.attempts import Attempt, NarrowRequest, find_last_attempt, make_attempt
from surgery.width.choose import Demand, Heads, Rounding, Scores, check_demand
from surgery.width.narrow import finish
from surgery.width.shortfall import list_whole
from surgery.width.solve import Choice, named_widths

_log = logging.getLogger(__name__)


class Size(NamedTuple):
    """The size of a model.

    Attributes:
        macs: the multiply-accumulates of one forward pass on the example.
        parameters: the number of parameters.
    """

    macs: int
    parameters: int


class Pruned(NamedTuple):
    """The result of `prune`.

    Attributes:
        model: the small model, as trained last.
        plan: where the small model's tensors lie in the full model, over all steps.
        sizes: the sizes of the full model and of the model after each step.
    """

    model: nn.Module
    plan: Plan
    sizes: tuple[Size, ...]

    def __str__(self) -> str:
        """Return a table of the sizes, with their shares of the full model.

        >>> print(Pruned(nn.Identity(), Plan({}, {}), (Size(800, 904), Size(600, 679), Size(400, 454))))
                       MACs     parameters
        full    800 (100.0 %)  904 (100.0 %)
        step 1  600  (75.0 %)  679  (75.1 %)
        step 2  400  (50.0 %)  454  (50.2 %)
        """
        rows = [("", "MACs  ", "parameters  ")]
        for number, size in enumerate(self.sizes):
            shares = [f"({100 * count / max(full, 1):.1f} %)" for count, full in zip(size, self.sizes[0])]
            macs, parameters = (f"{count:,} {share:>9}" for count, share in zip(size, shares))
            rows.append((f"step {number}" if number else "full", macs, parameters))
        first, second, third = (max(map(len, column)) for column in zip(*rows))
        return "\n".join(f"{a:{first}}  {b:>{second}}  {c:>{third}}".rstrip() for a, b, c in rows)

    def __repr__(self) -> str:
        return str(self)


def prune(
    model: nn.Module,
    *,
    example: Any,
    target: Target,
    importance: Name | Criterion | Scores | Callable[[nn.Module], Scores] | Any = "l1",
    batches: Iterable[Any] = (),
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    steps: int | Sequence[float] = 1,
    finetune: Callable[[nn.Module, int], nn.Module | None] | None = None,
    keep: Sequence[str] = (),
    output: Callable[[Any], Any] | None = None,
    heads: Heads = "inside",
    rounding: Rounding = math.ceil,
    strict: bool = False,
) -> Pruned:
    """Prune a model to a size, at once or in steps.

    First try the cut to the target on the full model. This refuses unreachable targets before training, and logs once
    which widths cannot shrink. Then each step scores the positions, cuts the model, and trains it. Scores of
    torch-pruning's classes are compared without normalisation (`Target(normalise=False)`), as in torch-pruning.

    Args:
        model: any module; it is not changed.
        example, keep, output, heads, rounding: as for `surgery.narrow`.
        target: the largest size of the last model, as shares of the full model or as numbers: `Target(macs=0.5)`,
            `Target(parameters=4_000_000, macs=300e6)`. Its floor is a share of the full model's widths in all steps.
        importance: one of four:

            - a criterion, as `by` of `surgery.pruning.importance`: a name, a function of a parameter's name, rows and
              an axis, or an object of one of torch-pruning's importance classes;
            - a function from a model to scores like the ones of `surgery.pruning.importance`. It receives the model of
              each step and must not change it;
            - such scores;
            - None: all widths keep the same share, their first positions.
        batches, loss: as for `surgery.pruning.importance`.
        steps: number of steps; each removes equally many positions, as in torch-pruning. Or, for a target that is one
            share, the shares after each step, falling to the target: `[0.8, 0.65, 0.5]`.
        finetune: trains the small model after each step; called with the model and the step's number, from 1. It
            changes the model in place, or returns a model with tensors of the same names and shapes. Without `finetune`
            batch norms keep their old statistics. This makes later scores that need `batches` wrong, and a warning says
            so. `lambda model, step: surgery.symmetry.repair(model, batches=inputs)` measures the statistics again.
        strict: as for `surgery.narrow`; applies to the first, full cut.

    Returns:
        The small model, the plan that maps its state to the full model's, and the sizes before the first step and after
        each. `plan.extract(model)` returns the small model's tensors as they were before any training.

    Raises:
        SurgeryError: as `surgery.narrow` and `surgery.pruning.importance` do. If the steps do not fall to the target.
            If `finetune` returns a model with other tensors.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(4, 100), nn.ReLU(), nn.Linear(100, 4))
    >>> small, plan, sizes = prune(net, example=torch.zeros(1, 4), target=Target(macs=0.5), steps=2)
    >>> sizes
    (Size(macs=800, parameters=904), Size(macs=600, parameters=679), Size(macs=400, parameters=454))
    """
    check_runs(model, example, "prune")
    if not isinstance(target, Target):
        raise SurgeryError(f"target is a Target of macs, parameters or positions, got {target!r}", code="argument")
    if finetune is not None and (not callable(finetune) or takes(finetune, 2) is False):
        got = f"{name_of(finetune)}, which does not take both" if callable(finetune) else repr(finetune)
        raise SurgeryError(f"finetune is a function of a model and a step's number, got {got}", code="argument")
    if importance is not None and not isinstance(importance, Mapping):
        check_criterion(importance)
    if callable(importance) and takes(importance, 1) is False and takes(importance, 3) is False:
        raise SurgeryError(
            f"{name_of(importance)} takes neither a name, rows and an axis (a criterion) nor a model alone",
            code="argument",
        )
    if is_pruner(importance):  # its class normalises scores itself; LAMP normalises otherwise
        target = replace(target, normalise=False)
    shares = _shares(steps, target)
    if len(shares) > 1 and finetune is None and importance in OF_DATA and _has_statistics(model):
        _log.warning(
            "steps=%r without finetune: batch norms keep their old statistics after each cut, which makes the next %s "
            "scores wrong; measure them again: finetune=lambda model, step: surgery.symmetry.repair(model, "
            "batches=inputs)",
            steps,
            importance,
        )
    batches = list(batches) if isinstance(batches, Iterator) else batches  # every step reads them

    def scores(net: nn.Module) -> Scores | None:
        if importance is None or isinstance(importance, Mapping):
            return importance
        if not callable(importance) or is_criterion(importance) or is_pruner(importance):
            return score_widths(net, example=example, by=importance, batches=batches, loss=loss, output=output)
        measure: Any = importance
        with explain(f"{name_of(importance)}(model) fails"):
            result = measure(net)
        if not isinstance(result, Mapping):
            kind = type(result).__name__
            raise SurgeryError(f"{name_of(importance)}(model) gives {kind}, not scores", code="argument")
        return result

    scorer = "importance" if importance is None or isinstance(importance, Mapping) else name_of(importance)
    demand = check_demand(model, Demand(target.rate, {}, keep, heads, rounding))
    request = NarrowRequest(model, example, demand, output, strict, scores(model), sizing(target, by=scorer))
    cut = find_last_attempt(request)  # refuse now; report shortfalls once
    full = {measure: _cost(cut, measure).full for measure in target.wanted}
    asked, target = target, target.as_shares(full)
    if len(shares) == 1 or strict:
        _report_missed(asked, target, _limits(cut, target).share(cut.chosen.choice), strict)
    finish(cut)
    sizes_before = {name: atom.size for name, atom in named_widths(cut.solution).items()}
    request = replace(request, strict=False)
    reported = {(width.tensor, width.axis) for width in cut.whole}
    left = full
    net, plan, sizes = model, None, [_size(cut, {})]
    for number, share in enumerate(shares, 1):
        if len(shares) > 1:
            step_scores = request.scores if number == 1 else scores(net)
            try:
                limits = target.wanted if isinstance(steps, int) else {target.measure: share}
                part = target.of({w: min(1.0, limit * full[w] / left[w]) for w, limit in limits.items()})
                step = replace(request, model=net, scores=step_scores, sizing=sizing(part, sizes_before, scorer))
                if isinstance(steps, int) and number < steps:  # an equal part of what is left to cut
                    ahead = make_attempt(step, cut.known)
                    count = _cost(ahead, "positions")
                    stay = count.full - (count.full - count(ahead.chosen.choice)) / (steps - number + 1)
                    part = target.of({"positions": stay / count.full})
                    step = replace(step, sizing=sizing(part, sizes_before, scorer))
                cut = find_last_attempt(step)
            except SurgeryError as error:
                raise SurgeryError(
                    f"step {number} of {len(shares)}, from {_used_share(target, left, full):.1%}: {error}",
                    code=error.code,
                ) from error
            if fresh := [width for width in cut.whole if (width.tensor, width.axis) not in reported]:
                _log.warning(list_whole(net, fresh))
                reported |= {(width.tensor, width.axis) for width in fresh}
        net, choice = cut.plan.build(net), cut.chosen.choice
        left = {measure: _cost(cut, measure)(choice) for measure in full}
        plan = plan.compose(cut.plan) if plan else cut.plan
        sizes.append(_size(cut, choice))
        net = _train(net, finetune, number)
    if len(shares) > 1:
        _report_missed(asked, target, _used_share(target, left, full), strict=False)
    return Pruned(net, plan, tuple(sizes))


def _has_statistics(model: nn.Module) -> bool:
    """Return whether a batch norm of the model keeps statistics."""
    return any(isinstance(m, BatchNorm) and m.running_mean is not None for m in model.modules())


def _shares(steps: int | Sequence[float], target: Target) -> Sequence[float]:
    """Return the share of the full model that each step aims at."""
    if isinstance(steps, int) and not isinstance(steps, bool) and steps >= 1:
        return [target.share] * steps
    if len(target.wanted) > 1 or target.share > 1:
        raise SurgeryError(f"steps={steps!r} are shares, and {target} is not one share: give how many", code="argument")
    shares = [1.0, *steps] if isinstance(steps, Sequence) and not isinstance(steps, str) else []
    falls = all(isinstance(b, Real) and a > b for a, b in pairwise(shares))
    if len(shares) < 2 or not falls or shares[-1] != target.share:
        raise SurgeryError(
            f"steps={steps!r}: give how many, or shares that fall from 1 to the target's {target.share}",
            code="argument",
        )
    return shares[1:]


def _train(net: nn.Module, finetune: Callable[[nn.Module, int], nn.Module | None] | None, number: int) -> nn.Module:
    """Train and return a step's model; SurgeryError if its tensors are others."""
    if finetune is None:
        return net
    before = shapes_of(net)
    result = finetune(net, number)
    trained = net if result is None else result
    if not isinstance(trained, nn.Module):
        kind = type(trained).__name__
        raise SurgeryError(f"finetune(model, {number}) gives {kind}, no model or None", code="argument")
    check_same_shapes(before, shapes_of(trained), "the narrow model", f"what finetune(model, {number}) gives")
    return trained


def _used_share(target: Target, left: Mapping[Measure, int], full: Mapping[Measure, int]) -> float:
    """Return the share of the full model that is left, see `Limits.share`."""
    if len(full) == 1:
        return left[target.measure] / full[target.measure]
    return max(left[measure] / full[measure] / share for measure, share in target.wanted.items()) * target.share


def _limits(cut: Attempt, target: Target) -> Limits:
    return Limits(target, cut.seen.model, cut.solution, cut.seen.found.lengths[0])


def _cost(cut: Attempt, measure: Measure) -> Cost:
    """Return a function that counts what a choice of positions leaves, such as MACs."""
    return Cost(cut.seen.model, cut.solution, measure, cut.seen.found.lengths[0])


def _size(cut: Attempt, choice: Choice) -> Size:
    return Size(_cost(cut, "macs")(choice), _cost(cut, "parameters")(choice))


def _report_missed(asked: Target, target: Target, share: float, strict: bool) -> None:
    """Log that a target was missed; raise SurgeryError with `strict`."""
    if message := describe_miss(asked, target, share):
        if strict:
            raise SurgeryError(message, code="target")
        _log.warning(message)
