"""Narrower models, and the widths that a model has."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from torch import nn

from surgery.errors import SurgeryError
from surgery.forward import check_runs, named_tensors, tensors_in, uncollected
from surgery.names import joined
from surgery.plan import Plan
from surgery.width.attempts import Attempt, Request, attempts, final
from surgery.width.check import difference_where_it_is
from surgery.width.choose import Demand, Heads, Rounding, Scores, Shares, checked, choose, parsed
from surgery.width.corner import corner
from surgery.width.made_constants import other_constants
from surgery.width.positions import Positions
from surgery.width.rules import registry
from surgery.width.shortfall import (
    constant_scales,
    constants_differ,
    listed,
    unused_tensors,
)
from surgery.width.solve import Atom, named_widths, size_of, solve
from surgery.width.trace import traced

_log = logging.getLogger(__name__)


def narrow(
    model: nn.Module,
    width: Shares | None = None,
    example: Any = None,
    *,
    like: nn.Module | None = None,
    positions: Positions | None = None,
    scores: Scores | None = None,
    keep: Sequence[str] = (),
    output: Callable[[Any], Any] | None = None,
    heads: Heads = "inside",
    rounding: Rounding = math.ceil,
    strict: bool = False,
) -> tuple[nn.Module, Plan]:
    """Return a narrower copy of any module: the first, or the best, ceil(width * C) positions of every width C.

    A `width` says how much stays. Or `positions` say what stays. Or a smaller model `like` gives the shapes, and a copy
    of it gets the first positions of every axis: nothing runs. Exactly one of the three is given.

    But for `like`, one forward pass in evaluation mode shows which axes of which tensors are one width, and another in
    training mode if the model does something else there. The narrow model's own passes are then compared, operation by
    operation, with what the algebra of axes predicts, so that no wrong model is returned. All run on the meta device if
    the model can, so that they cost little. If an operation has a rule of yours (`surgery.register_rule`), the narrow
    model also runs once where it is.

    Args:
        model: any module; it is not changed.
        width: a share in (0, 1] of every hidden width, 0.5 for half of it. Or by name of modules the share (a float)
            or the number of positions (an int) of the widths that they make: `{"layer1": 0.5, "*.mlp.fc1": 64, "*":
            0.75}`. A pattern matches a module's name or that of one around it; `*`, `?` and `[...]` are as in file
            names. The first pattern that matches counts; a width that none matches stays whole, so that "*" as the last
            one gives the share of all others. A number is the length of the axis that a module makes, exactly and
            whatever `rounding` is: of four heads a multiple of 4, of an LSTM all gates. Mind that 1 is one position,
            and 1.0 all of them.
        example: an input: a tensor, a tuple of arguments or a dict of keyword arguments; needed, but for `like`. Its
            axes, and those of the output (classes), stay whole; so does everything that the forward passes do not use.
        like: a smaller model of the same architecture, with the same names of tensors; it is not changed. The options
            from `scores` to `rounding` do not go with it.
        positions: by width, as `widths` names them, the positions that stay, ascending: `{"fc1.weight:0": [0, 2, 5]}`.
            Others stay whole. Of a width whose order matters they are the first ones. `scores`, `heads` and `rounding`
            do not go with them. To put positions in another order is `surgery.symmetry.permute`.
        scores: by width, as `surgery.pruning.importance` gives them: those with the highest stay, in their order; of
            equal ones the first. A width whose order matters (`widths` says why) keeps its first positions even so.
        keep: such patterns of modules whose tensors stay whole.
        output: what of the output has to keep its shape: `lambda y: y.logits` for a model that also returns its hidden
            states. If it computes (`lambda y: y.logits[:, -1]`), what it computes with keeps its shape.
        heads: `inside` keeps all heads of an attention and slices inside each of them (of 4 heads of 25 positions 4 of
            13 stay, and 52 of another width of 100 if the code reads the one size from the other); `drop` keeps the
            first heads, and is refused where constants and scales that the code makes for heads are others with fewer
            of them (BLOOM's).
        rounding: from share * C to the number of positions kept, which is at least one and at most C; or a whole number
            of which it is a multiple, upwards. `zoo.divisor8` gives the multiples of 8 that MobileNets have.
        strict: whether a hidden width that stays whole, although it was to shrink, is an error, and a tensor that no
            pass has used although it is as long as a width that shrinks, and a constant of the code along a width whose
            order matters that is not the first positions of the full model's, and a number that scales attention and
            stays though it is no power of a width, and for one width for all a configuration that cannot say the new
            widths. Otherwise such widths are logged as a
            warning with the reasons, and an error only if nothing shrinks; such tensors and constants are logged, too.

    Returns:
        The narrow module, and the plan that maps its state to the model's.

    Raises:
        SurgeryError: if no hidden width can shrink, or with `strict` not all of them (a model that has none is copied);
            if a pattern matches no module, or decides nothing; if a width cannot keep the number of positions asked
            for, or modules that make one width are to have different shares; for scores of another model, and if there
            are none for a width that is to shrink; if `like` has other names of tensors than the model (in depth, say),
            or is larger somewhere; for positions of a width that the model does not have or that must stay whole.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 5))
    >>> small, plan = narrow(net, 0.5, torch.zeros(2, 3, 4, 4))
    >>> small[0], small[3]
    (Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1)), Linear(in_features=16, out_features=5, bias=True))
    >>> narrow(net, {"0": 3}, torch.zeros(2, 3, 4, 4))[0][0].out_channels
    3
    >>> narrow(net, like=small)[1] == plan
    True
    >>> narrow(net, positions={"0.weight:0": [1, 6]}, example=torch.zeros(2, 3, 4, 4))[1].entries["0.bias"][0].index
    (((1, 2), (6, 7)),)
    >>> torch.equal(plan.extract(net)["0.weight"], net[0].weight[:4])
    True
    """
    _check_one(width=width, like=like, positions=positions)
    options = {
        "scores": scores is not None,
        "keep": not isinstance(keep, Sequence) or len(keep) > 0,
        "output": output is not None,
    }
    options |= {"heads": heads != "inside", "rounding": rounding is not math.ceil}
    if like is not None:
        _check_without("like", options)
        return corner(model, like)
    check_runs(model, example, "narrow")
    if positions is not None:
        _check_without("positions", {name: options[name] for name in ("scores", "heads", "rounding")})
    rate, rates = parsed(1.0 if width is None else width)
    demand = checked(model, Demand(rate, rates, keep, heads, rounding))
    request = Request(model, example, demand, output, strict, scores, positions=positions)
    found = final(request)
    return finished(found), found.plan


def _check_one(**ways: Any) -> None:
    """Raise SurgeryError unless the caller says in one way how narrow the model is to be."""
    told = [name for name, value in ways.items() if value is not None]
    if len(told) != 1:
        raise SurgeryError(
            f"narrow takes one of {', '.join(ways)}, got {' and '.join(told) or 'none'}: give width=0.5 (half of every "
            "width), like=small (a smaller model) or positions={'fc1.weight:0': [0, 2]} (what stays)",
            code="argument",
        )


def _check_without(way: str, options: Mapping[str, bool]) -> None:
    """Raise SurgeryError for options that have no meaning where one way says all of what stays."""
    if told := [name for name, is_given in options.items() if is_given]:
        raise SurgeryError(
            f"with {way} nothing is left to choose: leave out {', '.join(told)}, or give a width instead",
            code="argument",
        )


@uncollected()
def finished(found: Attempt) -> nn.Module:
    """Return the narrow model; where it is less than what was asked for, that is logged, or with `strict` an error."""
    wanted = found.request
    model, strict = wanted.model, wanted.strict
    solution, demand, chosen, plan = found.solution, found.demand, found.chosen, found.plan
    others = other_constants(model, wanted.example, wanted.output, found.seen, solution, chosen.choice, plan)
    small = plan.built(model)
    _try_taught(found, small)
    whole = listed(model, found.whole)
    for shortfall, refused in (
        (whole, strict or not chosen.choice),
        (constants_differ(model, others), strict),
        (found.undescribed, strict and not (demand.rates or demand.keep or demand.choice)),  # of modules by their names
        (constant_scales(model, found.checked.constant), strict),
        (unused_tensors(solution, chosen.choice, small, demand.keep), strict),
    ):
        if shortfall and refused:
            raise SurgeryError(shortfall, code="width" if shortfall == whole else "strict")
        if shortfall:
            _log.warning(shortfall)
    return small


def _try_taught(found: Attempt, small: nn.Module) -> None:
    """Raise SurgeryError if the narrow model runs on the meta device alone, because a rule of a user's is wrong.

    There an operation's `register_fake` has run, which may accept what the operation itself does not.
    """
    model, example, seen, solution = found.request.model, found.request.example, found.seen, found.solution
    taught = sorted({rule.name for rule in registry.RULES.values() if rule.taught} & {s.name for s in solution.steps})
    tensors = (*tensors_in(example), *(tensor for _, tensor in named_tensors(model)))
    if not taught or not seen.on_meta or any(tensor.is_meta for tensor in tensors):
        return
    difference = difference_where_it_is(small, solution, found.chosen.choice, example)
    if difference and not (of_full := difference_where_it_is(model, solution, {}, example)):
        raise SurgeryError(
            f"the rule for {' or '.join(taught)} is wrong: the narrow {type(model).__name__} runs on the meta device, "
            f"as register_fake says, and not on the example itself: {difference}",
            code="run",
        )
    if difference:
        _log.warning(
            "the rule for %s could not be tried: %s does not run on the example itself: %s",
            " and ".join(taught), type(model).__name__, of_full,
        )  # fmt: skip


class Width(NamedTuple):
    """Positions that must be kept or dropped together, and where they lie.

    Attributes:
        size: how many there are.
        kept: how many of them stay at the given width; `size` if all of them must.
        reason: why all of them must stay, or "".
        members: (tensor name, axis) of every axis that they lie along.
        name: by which `surgery.symmetry.permute`, `importance` and `narrow(..., scores=)` know it.
        grouping: "heads" or "groups" if its positions tell these apart; positions within a head or a group are another
            width, the same for all of them.
        order: why the positions cannot be put in another order, or "". If fewer than all stay, it is the first ones.

    >>> Width(6, 3, "", (("fc1.weight", 0), ("fc2.weight", 1)), "fc1.weight:0")
    Width(fc1.weight:0, 6 -> 3)
    """

    size: int
    kept: int
    reason: str
    members: tuple[tuple[str, int], ...]
    name: str = ""
    grouping: str = ""
    order: str = ""

    def __repr__(self) -> str:
        size = f"{self.size} -> {self.kept}" if self.kept < self.size else f"{self.size}"
        return (
            f"Width({', '.join(part for part in (self.name, size, self.grouping, self.reason or self.order) if part)})"
        )


_PLACES = 2  # tensors that a row of the table names of those along which a width lies


class Widths(list[Width]):
    """A list of widths that prints as a table; `surgery.widths` shows one.

    Attributes:
        shrink: whether a width was asked for, so that the table says how many positions are kept.
    """

    shrink = True

    def __repr__(self) -> str:
        rows = [("name", "size", "kept", "grouping", "lies along", "all stay, or the first ones, since")]
        for width in self:
            places = ", ".join(f"{tensor}:{axis}" for tensor, axis in width.members[:_PLACES])
            more = len(width.members) - _PLACES
            along = f"{places}, +{more} more" if more > 0 else places
            why = width.reason or width.order
            rows.append((width.name, str(width.size), str(width.kept), width.grouping, along, why))
        columns = [*zip(*rows)]
        pads = [str.ljust, str.rjust, str.rjust, str.ljust, str.ljust, str.ljust]
        if not self.shrink:
            del columns[2], pads[2]
        lengths = [max(map(len, column)) for column in columns]
        lines = ("  ".join(pad(cell, n) for pad, cell, n in zip(pads, row, lengths)) for row in zip(*columns))
        return "\n".join(line.rstrip() for line in lines)


def widths(
    model: nn.Module,
    example: Any,
    width: Shares | None = None,
    *,
    heads: Heads = "inside",
    rounding: Rounding = math.ceil,
    output: Callable[[Any], Any] | None = None,
) -> Widths:
    """List the coupled widths of a model, in the order of their first tensors, and how much `narrow` keeps of each.

    Args:
        model, example, heads, rounding, output: as for `surgery.narrow`.
        width: as for `surgery.narrow`; None keeps every width.

    Returns:
        A list of `Width`, which prints as a table, without the column of what is kept if no `width` is given.

    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> import torch
    >>> widths(net, torch.zeros(1, 4), 0.5)
    name        size  kept  grouping  lies along                     all stay, or the first ones, since
    0.weight:0     6     3            0.weight:0, 0.bias:0, +1 more
    0.weight:1     4     4            0.weight:1                     it is an axis of the input
    2.weight:0     2     2            2.weight:0, 2.bias:0           it is an axis of the output
    >>> [width.name for width in widths(net, torch.zeros(1, 4)) if not width.order]
    ['0.weight:0']
    """
    check_runs(model, example, "widths")
    rate, rates = parsed(1.0 if width is None else width)
    demand = checked(model, Demand(rate, rates, heads=heads, rounding=rounding))
    if rate == 1 and not rates:
        solution = solve(traced(model, example, output).found)
        chosen = choose(solution, demand)
    else:
        row = attempts(Request(model, example, demand, output))
        found = next(row)
        with suppress(SurgeryError):  # nothing can shrink: what is known of the widths shows why
            for further in row:
                found = further
        solution, chosen, demand = found.solution, found.chosen, found.demand
    names = {atom: name for name, atom in named_widths(solution).items()}

    def reason(atom: Atom) -> str:
        why = chosen.why(atom)
        if why or atom in chosen.choice or demand.rate_of(atom) == 1:
            return why.text if why else ""
        if atom.grouping:
            return "it tells heads or groups apart, and each of these shrinks"
        return "a smaller share rounds to all of it, or another digit of the same width shrinks"

    table = Widths(
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
    )
    table.shrink = width is not None
    return table
