"""Which axes of which tensors are one width, and how much of each stays."""

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from torch import nn

from surgery.errors import SurgeryError
from surgery.names import joined
from surgery.width.choose import choose
from surgery.width.demand import Demand, Heads, Rounding, checked
from surgery.width.scores import named_widths
from surgery.width.search import Search
from surgery.width.solved import Atom, size_of, solve
from surgery.width.trace import traced


class Width(NamedTuple):
    """Positions that must be kept or dropped together, and where they lie.

    Attributes:
        size: how many there are.
        kept: how many of them stay at the given rate; `size` if all of them must.
        reason: why all of them must stay, or "".
        members: (tensor name, axis) of every axis that they lie along.
        name: by which `surgery.permute`, `importance` and `narrow(..., keep_top=)` know it.
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
    demand = checked(model, Demand(rate, heads=heads, rounding=rounding))
    if rate == 1:
        solution = solve(traced(model, example, output).found)
        chosen = choose(solution, demand)
    else:
        search = Search(model, example, demand, output, strict=False)
        with suppress(SurgeryError):  # nothing can shrink: what is known of the widths shows why
            search.plan()
        solution, chosen = search.solution, search.chosen
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
