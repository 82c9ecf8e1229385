"""How much of each width stays, and which positions of it."""

import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import nn

from surgery.errors import SurgeryError
from surgery.names import joined
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
    size_of,
    summed_over,
    terms,
)
from surgery.width.why import Kind, Why, firmest, lost, role

Rounding: TypeAlias = Callable[[float], int]
Heads: TypeAlias = Literal["inside", "drop"]
Pick: TypeAlias = Callable[[Atom, int], Sequence[int]]
"""Which n positions of a width stay, ascending."""


def first(atom: Atom, n: int) -> Sequence[int]:
    """The first n positions."""
    return range(n)


@dataclass(frozen=True)
class Demand:
    """What the caller asks for.

    Attributes:
        rate: the share of every width that stays.
        rates: other shares for widths that modules of these names make; the first pattern that matches counts.
        keep: names of modules whose tensors stay whole.
        heads: whether attention shrinks inside of its heads, or loses heads.
        rounding: from a share to the number of positions that stay.
        pick: which ones stay.
        numbers: how many positions of each of some widths stay, if that is not their share.

    Patterns are names of modules, with `*`, `?` and `[...]` as in file names. What is inside of a module that matches
    matches, too.
    """

    rate: float
    rates: Mapping[str, float] = field(default_factory=dict)
    keep: Sequence[str] = ()
    heads: Heads = "inside"
    rounding: Rounding = math.ceil
    pick: Pick = first
    numbers: Callable[[Collection[Atom]], Mapping[Atom, int]] | None = None

    def share(self, size: int, rate: float) -> int:
        """How many of `size` positions stay at this rate, at least one."""
        share = round(rate * size, 9)
        asked = self.rounding(share)
        if isinstance(asked, bool) or not isinstance(asked, int | float) or not math.isfinite(asked):
            raise SurgeryError(f"rounding({share}) gives {asked!r}: give a function that returns a whole number")
        if asked < 1 <= share:
            raise SurgeryError(f"rounding({share}) gives {asked}, and a width keeps at least 1 position: round up")
        return max(1, min(size, int(asked)))

    def asked_of(self, module: str) -> float | None:
        """The share that `rates` gives for what a module makes."""
        return next((rate for pattern, rate in self.rates.items() if matches(module, pattern)), None)

    def rate_of(self, atom: Atom) -> float:
        """The share of a width; SurgeryError if modules that make it together are to have different shares."""
        asked = {maker: rate for maker in atom.makers if (rate := self.asked_of(maker)) is not None}
        if len(set(asked.values())) > 1:
            a = next(iter(asked))
            b = next(maker for maker in asked if asked[maker] != asked[a])
            raise SurgeryError(
                f"rates asks for {asked[a]} of {a!r} and {asked[b]} of {b!r}, but both make one width of {atom.size} "
                "positions (they are added, say): give them the same rate"
            )
        return next(iter(asked.values()), self.rate)


def matches(module: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a module or of one around it.

    >>> matches("layer1.0.conv1", "layer1"), matches("layer1.0.conv1", "*.conv1"), matches("layer10", "layer1")
    (True, True, False)
    """
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


def checked(model: nn.Module, demand: Demand) -> Demand:
    """The demand; SurgeryError if a rate is no share, or a pattern matches no module of the model."""
    for rate in (demand.rate, *_rates(demand.rates)):
        if isinstance(rate, Mapping):
            raise SurgeryError(f"rate is one number, got {rate}: give rates by the names of modules as rates={{...}}")
        if isinstance(rate, bool | str) or not isinstance(rate, int | float) or not 0 < rate <= 1:
            raise SurgeryError(f"rate is a share of the width in (0, 1], got {rate}")
    if demand.heads not in ("inside", "drop"):
        raise SurgeryError(f"unknown heads={demand.heads!r}: choose inside or drop")
    if not callable(demand.rounding):
        raise SurgeryError(f"rounding is a function such as math.ceil, got {demand.rounding!r}")
    if isinstance(demand.keep, str) or not all(isinstance(pattern, str) for pattern in (*demand.keep, *demand.rates)):
        raise SurgeryError(f"keep is a list of names of modules, got {demand.keep!r}")
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in (*demand.keep, *demand.rates):
        if not any(matches(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see model.named_modules()"
            raise SurgeryError(f"no module of {type(model).__name__} matches {pattern!r}: {hint}")
    return demand


def _rates(rates: Any) -> Iterator[Any]:
    if not isinstance(rates, Mapping):
        raise SurgeryError(f"rates gives a rate for each pattern, {{'layer1': 0.5}}, got {rates!r}")
    yield from rates.values()


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
    reasons = _asked_to_stay(solution, demand)
    while True:
        sliced = _sliced(solution, demand, reasons)
        if demand.numbers:
            numbers = demand.numbers(sliced)
        else:
            numbers = {atom: demand.share(atom.size, demand.rate_of(atom)) for atom in sliced}
        choice = {atom: demand.pick(atom, n) for atom, n in numbers.items() if n < atom.size}
        torn = [axis for axis in solution.ordered if not _neighbours(axis, choice)]
        if not torn:
            return Chosen(choice, reasons, sliced)
        why = role("a window or a range runs over it, and the positions that stay would not be the first ones")
        reasons.update({atom: why for axis in torn for atom in atoms(axis) if atom not in reasons})


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
            elif free and isinstance(free[0], Atom):
                if free[0].grouping == "heads" and demand.heads == "inside":
                    reasons[free[0]] = Why(Kind.ASKED, "it tells heads apart, and heads='inside' keeps all of them")
                lone[free[0]] = None

    for found in solution.tensors.values():
        for axis in found:
            visit(axis)
    sliced = {atom for atom in lone if not any(atom in product for product in products)}
    for component in _components(list(products)):
        covers = [_Cover(chosen, component, lone.keys(), demand) for chosen in exact_covers(component)]
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
    lone: Sequence[Atom]  # what is a width alone elsewhere
    demand: Demand

    def cost(self) -> tuple[int, int, float, int, int]:
        """First the heads (few, or many if these are to be dropped), last the place of digits: rather the minor ones.

        In between: widths elsewhere that would stay whole, the distance from the share asked for, and groups.
        """
        heads = sum(grouping_of(digit) == "heads" for digit in self.digits)
        groups = sum(grouping_of(digit) == "groups" for digit in self.digits)
        others = dict.fromkeys(digit for product in self.products for digit in product)
        left = sum(digit in self.lone and digit not in self.digits for digit in others)
        minor = sum(product.index(digit) for product in self.products for digit in product if digit in self.digits)
        return -heads if self.demand.heads == "drop" else heads, left, self.deviation(), groups, -minor

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
        why = firmest(*map(chosen.why, free)) or lost("another digit of the same width shrinks, or none can")
        hidden = why.kind < Kind.OUTPUT or (why.kind is Kind.OUTPUT and any(atom in read for atom in free))
        held = [place for atom in free for place in solution.members.get(atom, ())]
        if hidden and why.kind is not Kind.ASKED and held:
            key, position = next((place for place in held if place[0][0] == module), held[0])
            shape = tuple(axis.size for axis in solution.tensors[key])
            found[tuple(free)] = Whole(module, joined(*key), shape, position, axis.size, why)
    return list(found.values())
