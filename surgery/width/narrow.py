"""Narrower models, and the widths that a model has."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import nn

from surgery.errors import SurgeryError
from surgery.forward import check_runs, uncollected
from surgery.names import joined
from surgery.plan import Plan
from surgery.width.attempts import Attempt, Request, attempts, final
from surgery.width.choose import Demand, Heads, Rounding, Scores, checked, choose
from surgery.width.made_constants import other_constants
from surgery.width.shortfall import (
    constants_differ,
    equally_long,
    listed,
    too_wide,
    unused_tensors,
)
from surgery.width.solve import Atom, named_widths, size_of, solve
from surgery.width.trace import traced

_log = logging.getLogger(__name__)


def narrow(
    model: nn.Module,
    *,
    rate: float | None = None,
    example: Any = None,
    rates: Mapping[str, float] | None = None,
    keep_top: Scores | None = None,
    keep: Sequence[str] = (),
    output: Callable[[Any], Any] | None = None,
    heads: Heads = "inside",
    rounding: Rounding = math.ceil,
    strict: bool = False,
) -> tuple[nn.Module, Plan]:
    """A narrower copy of any module: the first, or the best, ceil(rate * C) positions of every hidden width C.

    One forward pass in evaluation mode shows which axes of which tensors are one width, and another in training mode if
    the model does something else there. The narrow model's own passes are then compared, operation by operation, with
    what the algebra of axes predicts, so that no wrong model is returned. All run on the meta device if the model can,
    so that they cost little.

    Args:
        model: any module; it is not changed.
        rate: in (0, 1]; needed, unless `rates` are given (it is then 1).
        example: an input: a tensor, a tuple of arguments or a dict of keyword arguments; needed. Its axes, and those of
            the output (classes), stay whole; so does everything that the forward passes do not use.
        rates: other rates for the widths that modules of these names make: `{"layer1": 0.5, "*.mlp.fc1": 0.25}`. A
            pattern matches a module's name or that of one around it; `*`, `?` and `[...]` are as in file names. The
            first pattern that matches counts.
        keep_top: scores by width, as `surgery.pruning.importance` gives them: those with the highest stay, in their
            order; of equal ones the first. A width whose order matters (`widths` says why) keeps its first positions
            even so.
        keep: such patterns of modules whose tensors stay whole.
        output: what of the output has to keep its shape: `lambda y: y.logits` for a model that also returns its hidden
            states.
        heads: `inside` keeps all heads of an attention and slices inside each of them (of 4 heads of 25 positions 4 of
            13 stay, and 52 of another width of 100 if the code reads the one size from the other); `drop` keeps the
            first heads, and is refused where constants and scales that the code makes for heads are others with fewer
            of them (BLOOM's).
        rounding: from rate * C to the number of positions kept, which is at least one and at most C; or a whole number
            of which it is a multiple, upwards. `zoo.divisor8` gives the multiples of 8 that MobileNets have.
        strict: whether a hidden width that stays whole, although it was to shrink, is an error, and a tensor that no
            pass has used although it is as long as a width that shrinks, and a constant of the code along a width whose
            order matters that is not the first positions of the full model's. Otherwise such widths are logged as a
            warning with the reasons, and an error only if nothing shrinks; such tensors and constants are logged, too.

    Returns:
        The narrow module, and the plan that maps its state to the model's.

    Raises:
        SurgeryError: if no hidden width can shrink, or with `strict` not all of them (a model that has none is copied);
            if a pattern matches no module, or decides nothing; if modules that make one width are to have different
            rates; for scores of another model, and if there are none for a width that
            is to shrink.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 5))
    >>> small, plan = narrow(net, rate=0.5, example=torch.zeros(2, 3, 4, 4))
    >>> small[0], small[3]
    (Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1)), Linear(in_features=16, out_features=5, bias=True))
    >>> torch.equal(plan.extract(net)["0.weight"], net[0].weight[:4])
    True
    """
    if rate is None and not rates:
        raise SurgeryError("narrow takes a rate and an example; to copy the widths of a smaller model use corner")
    check_runs(model, example, "narrow")
    demand = checked(model, Demand(1.0 if rate is None else rate, rates or {}, keep, heads, rounding))
    request = Request(model, example, demand, output, strict, keep_top)
    found = final(request)
    return finished(found), found.plan


@uncollected()
def finished(found: Attempt) -> nn.Module:
    """The narrow model; where it is less than what was asked for, that is logged, or with `strict` an error."""
    wanted = found.request
    model, strict = wanted.model, wanted.strict
    solution, demand, chosen, plan = found.solution, found.demand, found.chosen, found.plan
    others = other_constants(model, wanted.example, wanted.output, found.seen, solution, chosen.choice, plan)
    small = plan.built(model)
    for shortfall, refused in (
        (listed(model, found.whole), strict or not chosen.choice),
        (equally_long(solution, demand, chosen), strict),
        (too_wide(solution, demand, chosen, small) if strict else "", strict),
        (constants_differ(model, others), strict),
        (unused_tensors(solution, chosen.choice, small, demand.keep), strict),
    ):
        if shortfall and refused:
            raise SurgeryError(shortfall)
        if shortfall:
            _log.warning(shortfall)
    return small


class Width(NamedTuple):
    """Positions that must be kept or dropped together, and where they lie.

    Attributes:
        size: how many there are.
        kept: how many of them stay at the given rate; `size` if all of them must.
        reason: why all of them must stay, or "".
        members: (tensor name, axis) of every axis that they lie along.
        name: by which `surgery.symmetry.permute`, `importance` and `narrow(..., keep_top=)` know it.
        grouping: "heads" or "groups" if its positions tell these apart; positions within a head or a group are another
            width, the same for all of them.
        order: why the positions cannot be put in another order, or "". If fewer than all stay, it is the first ones.
    """

    size: int
    kept: int
    reason: str
    members: tuple[tuple[str, int], ...]
    name: str = ""
    grouping: str = ""
    order: str = ""


def widths(
    model: nn.Module,
    *,
    example: Any,
    rate: float = 1.0,
    heads: Heads = "inside",
    rounding: Rounding = math.ceil,
    output: Callable[[Any], Any] | None = None,
) -> list[Width]:
    """The coupled widths of a model, in the order of their first tensors, and what `narrow` at this rate keeps of them.

    Args:
        model, example, rate, heads, rounding, output: as for `surgery.narrow`.

    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> import torch
    >>> for width in widths(net, example=torch.zeros(1, 4), rate=0.5): print(width[:4])
    (6, 3, '', (('0.weight', 0), ('0.bias', 0), ('2.weight', 1)))
    (4, 4, 'it is an axis of the input', (('0.weight', 1),))
    (2, 2, 'it is an axis of the output', (('2.weight', 0), ('2.bias', 0)))
    >>> [width.name for width in widths(net, example=torch.zeros(1, 4)) if not width.order]
    ['0.weight:0']
    """
    check_runs(model, example, "widths")
    demand = checked(model, Demand(rate, heads=heads, rounding=rounding))
    if rate == 1:
        solution = solve(traced(model, example, output).found)
        chosen = choose(solution, demand)
    else:
        row = attempts(Request(model, example, demand, output))
        found = next(row)
        with suppress(SurgeryError):  # nothing can shrink: what is known of the widths shows why
            for further in row:
                found = further
        solution, chosen = found.solution, found.chosen
    names = {atom: name for name, atom in named_widths(solution).items()}

    def reason(atom: Atom) -> str:
        why = chosen.why(atom)
        if why or atom in chosen.choice or rate == 1:
            return why.text if why else ""
        if atom.grouping:
            return "it tells heads or groups apart, and each of these shrinks"
        return "a smaller share rounds to all of it, or another digit of the same width shrinks"

    return [
        Width(
            atom.size,
            size_of(atom, chosen.choice),
            reason(atom),
            tuple((joined(*key), axis) for key, axis in members),
            names[atom],
            atom.grouping,
            atom.order,
        )
        for atom, members in solution.members.items()
        if atom.size > 1
    ]
