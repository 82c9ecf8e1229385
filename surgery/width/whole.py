"""The hidden widths that stay whole although they were to shrink, and why."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from surgery.names import joined
from surgery.width.choose import Chosen
from surgery.width.demand import Demand
from surgery.width.solved import (
    Atom,
    Solution,
    atoms,
    size_of,
    summed_over,
)
from surgery.width.why import Kind, Why, firmest, lost

_TOLD = 5  # widths that stayed whole are listed up to this number


class Whole(NamedTuple):
    """A hidden width that stays whole although it was to shrink.

    Attributes:
        module: whose layer makes it.
        tensor, shape, axis: a tensor that lies along it.
        size: how many positions it has.
        why: the reason.
    """

    module: str
    tensor: str
    shape: tuple[int, ...]
    axis: int
    size: int
    why: Why

    def __str__(self) -> str:
        return f"axis {self.axis} of {self.tensor} {self.shape} stays whole: {self.why.text}"


def stayed_whole(solution: Solution, demand: Demand, chosen: Chosen) -> list[Whole]:
    """The hidden widths that stay whole although they were to shrink, with the reasons; each width once.

    Classes, and whatever else is only an output, were not to shrink; an output that other layers read was.
    """
    found: dict[tuple[Atom, ...], Whole] = {}
    read = summed_over(solution)
    for module, axis in solution.made:
        free = [atom for atom in atoms(axis) if demand.share(atom.size, demand.rate_of(atom)) < atom.size]
        if not free or tuple(free) in found or size_of(axis, chosen.choice) < axis.size:
            continue
        if demand.numbers and any(atom in chosen.sliced for atom in atoms(axis)):
            continue  # it could shrink, but others are worth less
        reasons = [why for atom in free if (why := chosen.why(atom))]
        undone = [why for why in reasons if why.kind is Kind.LOST]  # it would shrink, if that part of it could
        why = firmest(*(undone or reasons)) or lost(
            "no share of its parts shrinks it: they shrink, or stay, for other widths"
        )
        hidden = why.kind < Kind.OUTPUT or (why.kind is Kind.OUTPUT and any(atom in read for atom in free))
        held = [place for atom in free for place in solution.members.get(atom, ())]
        if hidden and why.kind is not Kind.ASKED and held:
            key, position = next((place for place in held if place[0][0] == module), held[0])
            shape = tuple(axis.size for axis in solution.tensors[key])
            found[tuple(free)] = Whole(module, joined(*key), shape, position, axis.size, why)
    return list({str(width): width for width in found.values()}.values())  # an axis of several widths once


def told(model: nn.Module, whole: Sequence[Whole], what: str = "shrink") -> str:
    """Which widths stay whole, and why."""
    lines = [f"  {width}" for width in whole[:_TOLD]]
    if len(whole) > _TOLD:
        lines.append(f"  and {len(whole) - _TOLD} more; surgery.widths lists all")
    some = f"{len(whole)} hidden widths" if len(whole) > 1 else "a hidden width"
    return "\n".join([f"{some} of {type(model).__name__} cannot {what}:", *lines])
