"""Which axes of which tensors are one width, and how much of each stays."""

import math
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import nn

from surgery.deprecated import formerly
from surgery.errors import SurgeryError
from surgery.names import joined
from surgery.width import axes
from surgery.width.axes import Axis, atoms, digits, find, fix, is_fixed, positions
from surgery.width.trace import Trace, traced

Rounding: TypeAlias = Callable[[float], int]
Heads: TypeAlias = Literal["inside", "drop"]
Keep: TypeAlias = Callable[[Axis], int]  # how many of an atom's first positions stay


class Width(NamedTuple):
    """Positions that must be kept or dropped together, and where they lie.

    Attributes:
        size: how many there are.
        kept: how many of them stay at the given rate; `size` if all of them must.
        reason: why all of them must stay, or "".
        members: (tensor name, axis) of every axis that they lie along.
    """

    size: int
    kept: int
    reason: str
    members: tuple[tuple[str, int], ...]


@formerly("model example rate")
def widths(
    model: nn.Module, *, example: Any, rate: float = 1.0, heads: Heads = "inside", rounding: Rounding = math.ceil
) -> list[Width]:
    """The coupled widths of a model, in the order of their first tensors. Runs one forward pass in evaluation mode.

    Args:
        model, example, rate, heads, rounding: as for `surgery.narrow`.

    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> import torch
    >>> for width in widths(net, example=torch.zeros(1, 4), rate=0.5): print(width)
    Width(size=6, kept=3, reason='', members=(('0.weight', 0), ('0.bias', 0), ('2.weight', 1)))
    Width(size=4, kept=4, reason='it is an axis of the input', members=(('0.weight', 1),))
    Width(size=2, kept=2, reason='it is an axis of the output', members=(('2.weight', 0), ('2.bias', 0)))
    """
    trace = traced(model, example).found
    keep = choose(trace, rate, heads, rounding)
    members: dict[Axis, list[tuple[str, int]]] = {}
    for (module, attribute), found in trace.tensors.items():
        for i, axis in enumerate(found):
            for atom in dict.fromkeys(map(find, atoms(axis))):
                if atom.size > 1:
                    members.setdefault(atom, []).append((joined(module, attribute), i))
    return [Width(atom.size, keep(atom), _reason(atom, keep(atom), rate), tuple(at)) for atom, at in members.items()]


def _reason(atom: Axis, kept: int, rate: float) -> str:
    """Why all positions stay."""
    if atom.fixed or kept < atom.size or rate == 1:
        return atom.fixed
    if atom.grouping:
        return "it tells heads or groups apart, and each of these shrinks"
    return "a smaller share rounds to all of it, or another digit of the same width shrinks"


def choose(trace: Trace, rate: float, heads: Heads, rounding: Rounding) -> Keep:
    """How many of the first positions of each atom stay, so that every width shrinks to its share.

    Of a width that is a product (heads * head dimension, groups * channels within a group) exactly one digit shrinks.
    Products may share digits, so we choose the cheapest combination of digits for all of them together. A width that no
    layer makes (the rows of a table) stays whole, as do the axes of inputs and outputs.
    """
    made = {find(atom) for axis in trace.made for atom in atoms(axis)}
    used = [axis for found in trace.tensors.values() for axis in found]
    for axis in used:
        for atom in atoms(axis):
            if not atom.fixed and find(atom) not in made:
                fix(atom, "no layer makes it")
    while True:
        sliced = _sliced(used, rate, heads, rounding)

        def keep(atom: Axis, sliced=sliced) -> int:
            return _share(atom.size, rate, rounding) if find(atom) in sliced else atom.size

        torn = [axis for axis in trace.ordered if not _neighbours(axis, keep)]
        for axis in torn:  # a window or an arange runs over channels that would not stay next to each other
            fix(axis, "a window slides over it")
        if not torn:
            return keep


def _neighbours(axis: Axis, keep: Keep) -> bool:
    """Whether the positions that stay are the first ones."""
    if find(axis).kind == "atom" or is_fixed(axis):
        return True
    kept = positions(axis, keep)
    return kept == list(range(len(kept)))


def _share(size: int, rate: float, rounding: Rounding) -> int:
    return max(1, min(size, int(rounding(round(rate * size, 9)))))


def _sliced(used: Iterable[Axis], rate: float, heads: Heads, rounding: Rounding) -> set[Axis]:
    """The atoms that shrink: those that are a width alone, and of each product one digit."""
    lone: dict[Axis, None] = {}
    products: dict[tuple[Axis, ...], None] = {}  # the digits of a width that may shrink

    def visit(axis: Axis) -> None:
        for term in axes.terms(axis):
            free = [find(d) for d in digits(term) if any(not atom.fixed for atom in atoms(d))]
            for digit in free:
                if digit.kind == "sum":
                    visit(digit)
            if len(free) > 1:
                products[tuple(free)] = None
            elif free and free[0].kind == "atom":
                lone[free[0]] = None

    for axis in used:
        visit(axis)
    sliced = {atom for atom in lone if not any(atom in product for product in products)}
    for component in _components(list(products)):
        candidates = list(dict.fromkeys(d for product in component for d in product))

        def cost(chosen: tuple[Axis, ...], component=component, candidates=candidates) -> tuple:
            wrong = sum(sum(d in chosen for d in product) != 1 for product in component)
            deviation = 0.0
            for product in component:
                size = math.prod(d.size for d in product)
                got = math.prod(_share(d.size, rate, rounding) if d in chosen else d.size for d in product)
                deviation += abs(got - _share(size, rate, rounding)) / size
            split = sum(d.grouping == "heads" for d in chosen)
            groups = sum(d.grouping == "groups" for d in chosen)
            left = sum(d in lone and d not in chosen for d in candidates)
            order = -sum(product.index(d) for product in component for d in product if d in chosen)
            return wrong, -split if heads == "drop" else split, left, deviation, groups, order

        limit = candidates if len(candidates) <= 12 else candidates[-12:]
        best = min((c for n in range(len(limit) + 1) for c in combinations(limit, n)), key=cost)
        if cost(best)[0]:
            sizes = [" * ".join(str(d.size) for d in product) for product in component]
            raise SurgeryError(
                f"widths of {', '.join(sizes[:4])} share digits, and no choice of digits shrinks each of them "
                "exactly once: keep the layers around them whole"
            )
        sliced.update(best)
    return {atom for digit in sliced for atom in atoms(digit) if not atom.fixed}


def _components(products: list[tuple[Axis, ...]]) -> list[list[tuple[Axis, ...]]]:
    """The products in groups; those of different groups share no digit."""
    components: list[list[tuple[Axis, ...]]] = []
    for product in products:
        touching = [c for c in components if any(d in other for other in c for d in product)]
        components = [c for c in components if not any(c is t for t in touching)]
        components.append([p for c in touching for p in c] + [product])
    return components
