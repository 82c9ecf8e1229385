"""Narrow a model, and list the widths of a model."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import compress
from typing import Any, NamedTuple

from torch import nn

from surgery.errors import SurgeryError
from surgery.forward import check_runs, named_tensors, pause_collector, tensors_in
from surgery.names import join
from surgery.plan import Plan
from surgery.width.attempts import Attempt, NarrowRequest, find_last_attempt, iterate_attempts
from surgery.width.check import find_difference_on_device
from surgery.width.choose import Demand, Heads, Rounding, Scores, Shares, check_demand, choose, parse_width
from surgery.width.corner import corner
from surgery.width.made_constants import other_constants
from surgery.width.positions import Positions
from surgery.width.rules import registry
from surgery.width.shortfall import (
    constant_scales,
    constants_differ,
    list_whole,
    unused_tensors,
)
from surgery.width.solve import Atom, named_widths, size_of, solve
from surgery.width.trace import trace_model

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
    """Return a narrower copy of a module.

    Of the C positions of every width, ceil(width * C) stay: the first ones, or with `scores` the best ones.

    Give exactly one of three arguments. `width` says how many positions stay. `positions` says which ones stay. `like`
    is a smaller model: its copy gets the first positions of every axis, and nothing runs.

    Without `like`, one forward pass in evaluation mode shows which axes of the tensors are one width. A second pass
    follows in training mode if the model computes something else there. Then the narrow model runs, and each of its
    operations is compared with the prediction of the algebra of axes, so that no wrong model is returned. All passes
    run on the meta device if the model can, which costs little. If an operation has a rule of yours
    (`surgery.register_rule`), the narrow model also runs once on its real device.

    Args:
        model: any module; it is not changed.
        width: the share in (0, 1] of every hidden width that stays, such as 0.5. Or a dictionary from names of modules
            to the share (a float) or the number of positions (an int) of the widths that the modules make: `{"layer1":
            0.5, "*.mlp.fc1": 64, "*": 0.75}`. A pattern matches the names of a module and of all modules inside it;
            `*`, `?` and `[...]` are as in file names. The first pattern that matches counts. A width that no pattern
            matches keeps its size, so a last "*" sets the share of all others. An int is the exact length of the axis
            that a module makes, whatever `rounding` is. 1 is one position, and 1.0 all of them. Two examples:

            - a projection to four heads: the length is a multiple of 4;
            - an LSTM: the length covers all of its gates.
        example: an input: a tensor, a tuple of arguments or a dict of keyword arguments; not needed with `like`. The
            axes of the input and of the output (classes) keep their size, as does all that no forward pass uses.
        like: a smaller model of the same architecture, with the same names of tensors; it is not changed. It excludes
            the options from `scores` to `rounding`.
        positions: from names of widths (see `widths`) to the positions that stay, ascending: `{"fc1.weight:0": [0, 2,
            5]}`. Other widths keep their size. If the order of a width matters, give its first positions. Excludes
            `scores`, `heads` and `rounding`. To reorder positions, use `surgery.symmetry.permute`.
        scores: from names of widths to scores, as `surgery.pruning.importance` returns them. The positions with the
            highest scores stay, in their order; of equal ones the first. If the order of a width matters (`widths`
            says why), its first positions stay, whatever the scores.
        keep: patterns, as in `width`, of modules whose tensors keep their size.
        output: selects the part of the output that must keep its shape: `lambda y: y.logits` for a model that also
            returns its hidden states. If it computes (`lambda y: y.logits[:, -1]`), its operands keep their shape.
        heads: `inside` keeps all heads of an attention and narrows each of them. With width 0.5, 4 heads of 25
            positions keep 13 positions each, 52 together. If the code computes another width of 100 from these sizes,
            that width keeps 52 as well. `drop` keeps the first heads. It is refused if constants or scales that the
            code makes change with the number of heads (as in BLOOM).
        rounding: a function from share * C to the number of positions that stay, from 1 to C. Or a whole number: round
            up to a multiple of it. `zoo.divisor8` gives the multiples of 8 in MobileNets.
        strict: whether each of these is an error. Without it they are logged as a warning with the reasons, and it is
            an error only if nothing shrinks:

            - a hidden width that does not shrink although it was to;
            - a tensor that no pass has used, although it is as long as a width that shrinks;
            - a constant that is not a prefix of the full model's, along a width with a fixed order;
            - a number that scales attention and does not change, since it is no power of a width;
            - with one share for all widths, a configuration that cannot express the new widths.

    Returns:
        The narrow module, and the plan that maps its state to the model's.

    Raises:
        SurgeryError: if no hidden width can shrink (a model that has none is copied). With `strict`, if any hidden
            width cannot. If a pattern matches no module, or changes nothing. If a width cannot keep the given number of
            positions, or if modules that make one width get different shares. If scores are of another model, or
            missing for a width that is to shrink. If `like` has other names of tensors than the model (another depth,
            say), or is larger somewhere. If positions are of a width that the model does not have, or that cannot
            shrink.

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
    rate, rates = parse_width(1.0 if width is None else width)
    demand = check_demand(model, Demand(rate, rates, keep, heads, rounding))
    request = NarrowRequest(model, example, demand, output, strict, scores, positions=positions)
    with pause_collector():
        attempt = find_last_attempt(request)
        return finish(attempt), attempt.plan


def _check_one(**ways: Any) -> None:
    """Raise SurgeryError unless exactly one argument says how narrow the model is."""
    names = [name for name, value in ways.items() if value is not None]
    if len(names) != 1:
        raise SurgeryError(
            f"narrow takes one of {', '.join(ways)}, got {' and '.join(names) or 'none'}: give width=0.5 (half of "
            "every width), like=small (a smaller model) or positions={'fc1.weight:0': [0, 2]} (what stays)",
            code="argument",
        )


def _check_without(way: str, options: Mapping[str, bool]) -> None:
    """Raise SurgeryError for options, since `way` alone says which positions stay."""
    if names := [name for name, is_given in options.items() if is_given]:
        raise SurgeryError(
            f"with {way} nothing is left to choose: leave out {', '.join(names)}, or give a width instead",
            code="argument",
        )


@pause_collector()
def finish(attempt: Attempt) -> nn.Module:
    """Return the narrow model.

    If it misses the request somewhere, log that, or raise SurgeryError with `strict`.
    """
    request = attempt.request
    model, strict = request.model, request.strict
    solution, demand, chosen, plan = attempt.solution, attempt.demand, attempt.chosen, attempt.plan
    others = other_constants(model, request.example, request.output, attempt.seen, solution, chosen.choice, plan)
    small = plan.build_unchecked(model)
    _run_with_user_rules(attempt, small)
    whole = list_whole(model, attempt.whole)
    for shortfall, refused in (
        (whole, strict or not chosen.choice),
        (constants_differ(model, others), strict),
        (
            attempt.configuration_problem,
            strict and not (demand.rates or demand.keep or demand.choice),
        ),  # no share for all widths
        (constant_scales(model, attempt.checked.unscaled), strict),
        (unused_tensors(solution, chosen.choice, small, demand.keep), strict),
    ):
        if shortfall and refused:
            raise SurgeryError(shortfall, code="width" if shortfall == whole else "strict")
        if shortfall:
            _log.warning(shortfall)
    return small


def _run_with_user_rules(attempt: Attempt, small: nn.Module) -> None:
    """Raise SurgeryError if a user's rule is wrong on the example's device.

    On the meta device the `register_fake` of an operation runs, which may accept more than the operation itself.
    """
    model, example, seen, solution = attempt.request.model, attempt.request.example, attempt.seen, attempt.solution
    rules = sorted({rule.name for rule in registry.RULES.values() if rule.taught} & {s.name for s in solution.steps})
    if not rules or not seen.on_meta:
        return
    tensors = (*tensors_in(example), *(tensor for _, tensor in named_tensors(model)))
    if any(tensor.is_meta for tensor in tensors):
        return
    difference = find_difference_on_device(small, solution, attempt.chosen.choice, example)
    if difference and not (of_full := find_difference_on_device(model, solution, {}, example)):
        raise SurgeryError(
            f"the rule for {' or '.join(rules)} is wrong: the narrow {type(model).__name__} runs on the meta device, "
            f"as register_fake says, and not on the example itself: {difference}",
            code="run",
        )
    if difference:
        _log.warning(
            "the rule for %s could not be tried: %s does not run on the example itself: %s",
            " and ".join(rules), type(model).__name__, of_full,
        )  # fmt: skip


class Width(NamedTuple):
    """Axes that share their positions: all keep or drop a position together.

    Attributes:
        size: the number of positions.
        kept: how many positions stay at the given width; `size` if the width cannot shrink.
        reason: why the width cannot shrink, or "".
        members: (tensor name, axis) of every axis.
        name: the width's name for `surgery.symmetry.permute`, `importance` and `narrow(..., scores=)`.
        grouping: "heads" or "groups" if a position is a whole head or group. Positions inside of heads or groups are
            another width, the same for all of them.
        order: why the positions cannot be reordered, or "". Then `narrow` keeps the first ones.

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


_FEW = 3  # so many widths that all stay for the same reason have a row each


class Widths(list[Width]):
    """A list of widths that prints as a table; `surgery.widths` shows one.

    The axes of convolutions' windows, and others that are alone and stay for one reason, are counted below the table.

    Attributes:
        shrink: whether a width was given; only then the table says how many positions stay.
    """

    shrink = True

    def __repr__(self) -> str:
        alone = Counter(width.reason for width in self if width.reason and len(width.members) == 1)
        counted = {cause: number for cause, number in alone.items() if number > _FEW}
        rows = [("name", "size", "kept", "grouping", "and along", "all or the first stay, since")]
        for width in self:
            if len(width.members) == 1 and width.reason in counted:
                continue
            others = [place for tensor, axis in width.members if (place := f"{tensor}:{axis}") != width.name]
            along = f"{others[0]}, +{len(others) - 1} more" if others[1:] else "".join(others)
            cause = width.reason or width.order
            rows.append((width.name, str(width.size), str(width.kept), width.grouping, along, cause))
        columns = [*zip(*rows)]
        pads = [str.ljust, str.rjust, str.rjust, str.ljust, str.ljust, str.ljust]
        shown = [True, True, self.shrink, any(columns[3][1:]), True, True]
        columns, pads = [*compress(columns, shown)], [*compress(pads, shown)]
        lengths = [max(map(len, column)) for column in columns]
        lines = ["  ".join(pad(cell, n) for pad, cell, n in zip(pads, row, lengths)) for row in zip(*columns)]
        lines += [f"{number} more, which all stay: {cause}" for cause, number in counted.items()]
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
    """List a model's widths, and how much `narrow` keeps of each.

    Widths are in the order of their first tensors.

    Args:
        model, example, heads, rounding, output: as for `surgery.narrow`.
        width: as for `surgery.narrow`; None keeps every width.

    Returns:
        A list of `Width`, which prints as a table. The table has a column `kept` if a `width` is given.

    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> import torch
    >>> widths(net, torch.zeros(1, 4), 0.5)
    name        size  kept  and along          all or the first stay, since
    0.weight:0     6     3  0.bias:0, +1 more
    0.weight:1     4     4                     it is an axis of the input
    2.weight:0     2     2  2.bias:0           it is an axis of the output
    >>> [width.name for width in widths(net, torch.zeros(1, 4)) if not width.order]
    ['0.weight:0']
    """
    check_runs(model, example, "widths")
    rate, rates = parse_width(1.0 if width is None else width)
    demand = check_demand(model, Demand(rate, rates, heads=heads, rounding=rounding))
    if rate == 1 and not rates:
        solution = solve(trace_model(model, example, output).found)
        chosen = choose(solution, demand)
    else:
        sequence = iterate_attempts(NarrowRequest(model, example, demand, output))
        attempt = next(sequence)
        with suppress(SurgeryError):  # if nothing can shrink, the last attempt shows why
            for later in sequence:
                attempt = later
        solution, chosen, demand = attempt.solution, attempt.chosen, attempt.demand
    names = {atom: name for name, atom in named_widths(solution).items()}

    def reason(atom: Atom) -> str:
        cause = chosen.why(atom)
        if cause or atom in chosen.choice or demand.rate_of(atom) == 1:
            return cause.text if cause else ""
        if atom.grouping:
            return "it tells heads or groups apart, and each of these shrinks"
        return "a smaller share rounds to all of it, or another factor of this width shrinks"

    table = Widths(
        Width(
            atom.size,
            size_of(atom, chosen.choice),
            reason(atom),
            tuple((join(*key), axis) for key, axis in members),
            names[atom],
            atom.grouping,
            atom.order,
        )
        for atom, members in solution.members.items()
        if atom.size > 1
    )
    table.shrink = width is not None
    return table
