"""How much of each width stays, and which positions of it."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from surgery.errors import SurgeryError
from surgery.width.demand import Demand, matches
from surgery.width.solved import (
    Atom,
    Axis,
    Choice,
    Solution,
    Sum,
    atoms,
    digits,
    grouping_of,
    is_whole,
    positions,
    terms,
)
from surgery.width.why import Kind, Why, lost, role

INSIDE = Why(Kind.ASKED, "it tells heads apart, and heads='inside' keeps all of them")


class Chosen(NamedTuple):
    """A choice, and where it comes from.

    Attributes:
        choice: the positions that stay.
        reasons: why atoms stay whole for which the trace alone has no reason.
        sliced: the atoms that may shrink.
    """

    choice: Choice
    reasons: Mapping[Atom, Why]
    sliced: Collection[Atom]

    def why(self, atom: Atom) -> Why | None:
        """Why an atom must stay whole."""
        return self.reasons.get(atom) or atom.why


def choose(solution: Solution, demand: Demand) -> Chosen:
    """Choose positions so that every width shrinks to its share.

    Of a width that is a product (heads * head dimension, groups * channels within a group) exactly one digit shrinks.
    Products may share digits, so we choose the cheapest combination of digits for all of them together. A width that no
    layer makes (the rows of a table) stays whole, as do the axes of inputs and outputs.
    """
    _check_used(solution, demand)
    reasons = _asked_to_stay(solution, demand)
    while True:
        sliced = _sliced(solution, demand, reasons)
        if demand.numbers:
            numbers = demand.numbers(sliced)
        else:
            numbers = {atom: demand.share(atom.size, demand.rate_of(atom)) for atom in sliced}
        choice = {atom: demand.pick(atom, n) for atom, n in numbers.items() if n < atom.size}
        torn = [(axis, why) for axis, why in solution.ordered if not _neighbours(axis, choice)]
        if not torn:
            return Chosen(choice, reasons, sliced)
        for axis, order in torn:
            why = role(f"{order}; the positions that stay would not be the first ones")
            reasons.update({atom: why for atom in atoms(axis) if atom not in reasons})


def _check_used(solution: Solution, demand: Demand) -> None:
    """SurgeryError for a pattern of `rates` that decides nothing."""
    for pattern in demand.rates:
        made = [(module, axis) for module, axis in solution.made if matches(module, pattern)]
        mine = [axis for module, axis in made if demand.pattern_of(module) == pattern]
        if mine and not all(map(is_whole, mine)):
            continue
        why = "no module that it matches makes a width"
        if made and not mine:
            why = "an earlier pattern matches the same modules"
        elif mine:
            why = next(atom.why.text for axis in mine for atom in atoms(axis))
        raise SurgeryError(f"rates[{pattern!r}] decides nothing: {why}")


def _asked_to_stay(solution: Solution, demand: Demand) -> dict[Atom, Why]:
    found = {}
    for pattern in demand.keep:
        held = [axes for (module, _), axes in solution.tensors.items() if matches(module, pattern)]
        made = [axis for module, axis in solution.made if matches(module, pattern)]
        for axis in (*made, *(axis for axes in held for axis in axes)):
            found.update(dict.fromkeys(atoms(axis), Why(Kind.ASKED, f"keep={pattern!r} asks for it")))
    return found


def _neighbours(axis: Axis, choice: Choice) -> bool:
    """Whether the positions that stay are the first ones."""
    if is_whole(axis) or not any(atom in choice for atom in atoms(axis)):
        return True
    kept = positions(axis, choice)
    return kept == list(range(len(kept)))


def _sliced(solution: Solution, demand: Demand, reasons: dict[Atom, Why]) -> list[Atom]:
    """The atoms that shrink, in the model's order: those that are a width alone, and of each product one digit."""
    lone: dict[Atom, None] = {}
    bound: set[Atom] = set()  # parts of a digit: they shrink if it is chosen
    products: dict[_Digits, None] = {}  # the digits of a width that may shrink

    def is_free(atom: Atom) -> bool:
        return not atom.why and atom not in reasons

    def visit(axis: Axis) -> None:
        for term in terms(axis):
            free = [digit for digit in digits(term) if any(map(is_free, atoms(digit)))]
            for digit in free:
                if isinstance(digit, Sum):
                    visit(digit)
            if len(free) > 1:
                products[tuple(free)] = None
                bound.update(atom for digit in free if isinstance(digit, Sum) for atom in atoms(digit))
            elif free and isinstance(free[0], Atom):
                if free[0].grouping == "heads" and demand.heads == "inside":
                    reasons[free[0]] = INSIDE
                lone[free[0]] = None

    for found in solution.tensors.values():
        for axis in found:
            visit(axis)
    sliced = {atom for atom in lone if atom not in bound and not any(atom in product for product in products)}
    for component in _components(list(products)):
        covers = [
            _Cover(chosen, component, lone.keys(), solution.written, demand) for chosen in exact_covers(component)
        ]
        if covers:
            sliced.update(min(covers, key=_Cover.cost).digits)
            continue
        sizes = [" * ".join(str(d.size) for d in product) for product in component[:4]]
        why = lost(f"widths of {', '.join(sizes)} share digits, and no choice of digits shrinks each exactly once")
        reasons.update({atom: why for product in component for digit in product for atom in atoms(digit)})
        return _sliced(solution, demand, reasons)
    found = {atom for digit in sliced for atom in atoms(digit) if is_free(atom)}
    return [atom for atom in solution.members if atom in found]


_Digits: TypeAlias = tuple[Atom | Sum, ...]


class _Cover(NamedTuple):
    """Digits of which each of some products has exactly one, and what they are compared by."""

    digits: _Digits
    products: Sequence[_Digits]
    lone: Collection[Atom]  # what is a width alone elsewhere
    written: Collection[Axis]  # what the code says as a number, and leaves another digit open
    demand: Demand

    def cost(self) -> tuple[int, int, int, float, int, int]:
        """First the heads (few, or many if these are to be dropped), last the place of digits: rather the minor ones.

        In between: widths elsewhere that would stay whole, digits that the code says as a number, the distance from
        the share asked for, and groups.
        """
        heads = sum(grouping_of(digit) == "heads" for digit in self.digits)
        groups = sum(grouping_of(digit) == "groups" for digit in self.digits)
        others = dict.fromkeys(digit for product in self.products for digit in product)
        left = sum(digit in self.lone and digit not in self.digits for digit in others)
        minor = sum(product.index(digit) for product in self.products for digit in product if digit in self.digits)
        written = sum(digit in self.written for digit in self.digits)
        return -heads if self.demand.heads == "drop" else heads, left, written, self.deviation(), groups, -minor

    def deviation(self) -> float:
        """How far the products' new sizes are from their share."""
        total = 0.0
        for product in self.products:
            size = math.prod(digit.size for digit in product)
            digit = next(digit for digit in product if digit in self.digits)
            rate = self.demand.rate_of(next(atoms(digit)))
            got = size // digit.size * self.demand.share(digit.size, rate)
            total += abs(got - self.demand.share(size, rate)) / size
        return total


def exact_covers(products: Sequence[Sequence]) -> Iterator[tuple]:
    """Every choice of elements of which each product has exactly one; an element that one has twice is not chosen.

    >>> list(exact_covers([("a", "b"), ("b", "c")]))
    [('a', 'c'), ('b',)]
    """
    twice = {digit for product in products for digit in product if list(product).count(digit) > 1}

    def extend(chosen: tuple, banned: set, left: list[Sequence]) -> Iterator[tuple]:
        if not left:
            yield chosen
            return
        options = [[digit for digit in product if digit not in banned] for product in left]
        for digit in min(options, key=len):
            covered = {other for product in left if digit in product for other in product}
            yield from extend((*chosen, digit), banned | covered, [p for p in left if digit not in p])

    yield from extend((), twice, list(products))


def _components(products: list[_Digits]) -> list[list[_Digits]]:
    """The products in groups; those of different groups share no digit."""
    components: list[list[_Digits]] = []
    for product in products:
        touching = [c for c in components if any(d in other for other in c for d in product)]
        components = [c for c in components if not any(c is t for t in touching)]
        components.append([p for c in touching for p in c] + [product])
    return components
