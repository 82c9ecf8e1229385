"""Choose how many positions of each width stay, and which, by demand and scores."""

import difflib
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from surgery.errors import SurgeryError, first_line
from surgery.names import hint, matches, named_modules
from surgery.width import axes
from surgery.width.axes import ReasonKind, Why, lost, role
from surgery.width.plan import runs_of
from surgery.width.solve import (
    Atom,
    Axis,
    Choice,
    Solution,
    Sum,
    atoms,
    digits,
    grouping_of,
    is_whole,
    named_widths,
    onto_atoms,
    size_of,
    solve,
    terms,
)
from surgery.width.trace import Trace

Rounding: TypeAlias = Callable[[float], int] | int
Heads: TypeAlias = Literal["inside", "drop"]
Pick: TypeAlias = Callable[[Atom, int], Sequence[int]]
"""A function from a width and n to the n positions that stay, ascending."""


def first(atom: Atom, n: int) -> Sequence[int]:
    """Return the first n positions."""
    return range(n)


@dataclass(frozen=True)
class Demand:
    """The caller's demand.

    Attributes:
        rate: the share of every width that stays.
        rates: other shares by pattern, for the widths that matching modules make. An int is the number of positions of
            each axis that they make. The first pattern that matches counts.
        keep: patterns of modules whose tensors keep their size.
        heads: how attention shrinks: inside its heads (inside), or by whole heads (drop).
        rounding: a function from a share of a size to the number of positions that stay; or an int: the number is
            rounded up to a multiple of it.
        pick: chooses the positions that stay.
        numbers: a function from widths to the number of positions of each that stays; None: by their shares.
        choice: the positions that stay, if the caller gives them; a width without an entry keeps its size.
        made: the length of the axis that a module makes, by (module, atom of the axis); only if `rates` has integers.

    Patterns are names of modules, with `*`, `?` and `[...]` as in file names. A pattern also matches everything inside
    a module that it matches.
    """

    rate: float
    rates: Mapping[str, float | int] = field(default_factory=dict)
    keep: Sequence[str] = ()
    heads: Heads = "inside"
    rounding: Rounding = math.ceil
    pick: Pick = first
    numbers: Callable[[Collection[Atom]], Mapping[Atom, int]] | None = None
    choice: Choice | None = None
    made: Mapping[tuple[str, Atom], int] = field(default_factory=dict)

    def along(self, solution: Solution) -> "Demand":
        """Return the same demand, with `made` taken from the model's axes."""
        if not any(isinstance(rate, int) for rate in self.rates.values()):
            return self
        lengths: dict[tuple[str, Atom], int] = {}
        for module, axis in solution.made:
            for atom in atoms(axis):
                lengths.setdefault((module, atom), axis.size)
        return replace(self, made=lengths)

    def count_kept(self, atom: Atom, size: int | None = None) -> int:
        """Return how many positions of an atom stay.

        With `size`: how many of `size` positions that shrink with it.
        """
        size = atom.size if size is None else size
        if not self.rates:
            return self.count_at(size, self.rate)
        rates = [self.rates[pattern] for maker in atom.makers if (pattern := self.pattern_of(maker)) is not None]
        by_number = any(isinstance(rate, int) for rate in rates)  # `rounding` does not change such a number
        demand = replace(self, rounding=math.ceil) if by_number else self
        return demand.count_at(size, self.rate_of(atom))

    def count_at(self, size: int, rate: float) -> int:
        """Return how many of `size` positions stay at this rate, at least one."""
        share = round(rate * size, 9)
        by = self.rounding
        number = by(share) if callable(by) else by * math.ceil(share / by)
        if isinstance(number, bool) or not isinstance(number, Real) or not math.isfinite(number):
            raise SurgeryError(
                f"rounding({share}) gives {number!r}: give a function that returns a whole number", code="argument"
            )
        if number < 1 <= share:
            raise SurgeryError(
                f"rounding({share}) gives {number}, but a width keeps at least 1 position: round up", code="argument"
            )
        return max(1, min(size, int(number)))

    def pattern_of(self, module: str) -> str | None:
        """Return the pattern of `rates` that counts for the axes that a module makes."""
        return next((pattern for pattern in self.rates if matches(module, pattern)), None)

    def rate_of(self, atom: Atom) -> float:
        """Return the share of a width; SurgeryError if its makers have several shares."""
        patterns = {maker: self.pattern_of(maker) for maker in atom.makers}
        demanded = {maker: self.rates[pattern] for maker, pattern in patterns.items() if pattern is not None}
        rates = {m: rate / self.made[m, atom] if isinstance(rate, int) else rate for m, rate in demanded.items()}
        if self.heads == "inside" and atom.grouping == "heads":  # all heads stay; shares change only sizes inside heads
            return max((rates.get(maker, self.rate) for maker in atom.makers), default=self.rate)
        if len(set(rates.values())) > 1:
            a = next(iter(rates))
            b = next(maker for maker in rates if rates[maker] != rates[a])
            raise SurgeryError(
                f"width asks for {demanded[a]} of {a!r} and {demanded[b]} of {b!r}, but both make one width of "
                f"{atom.size} positions (their results are added, say): give both the same",
                code="argument",
            )
        return next(iter(rates.values()), self.rate)


def check_demand(model: nn.Module, demand: Demand) -> Demand:
    """Return the demand; SurgeryError for wrong options or patterns without a match."""
    if demand.heads not in ("inside", "drop"):
        raise SurgeryError(f"unknown heads={demand.heads!r}: choose inside or drop", code="argument")
    if not (callable(demand.rounding) or (type(demand.rounding) is int and demand.rounding > 0)):
        raise SurgeryError(
            f"rounding is a function such as math.ceil or a whole number, got {demand.rounding!r}", code="argument"
        )
    if (
        not isinstance(demand.keep, Sequence)
        or isinstance(demand.keep, str)
        or not all(isinstance(pattern, str) for pattern in demand.keep)
    ):
        raise SurgeryError(f"keep is a list of names of modules, got {demand.keep!r}", code="argument")
    names = [name for name, _ in named_modules(model, tied=True)]
    for pattern in (*demand.keep, *demand.rates):
        if not any(matches(name, pattern) for name in names):
            raise SurgeryError(
                f"no module of {type(model).__name__} matches {pattern!r}: {hint(pattern, names)}", code="name"
            )
    return replace(demand, rounding=math.ceil) if demand.rounding == 1 else demand


Shares: TypeAlias = float | Mapping[str, float | int]
"""A share of every width; or, by names or patterns of modules, shares (float) and numbers of positions (int)."""


def parse_width(width: Any) -> tuple[float, dict[str, float | int]]:
    """Return the share of all widths, and other shares or numbers by pattern.

    >>> parse_width(0.5), parse_width({"layer1": 8, "*": 0.5}), parse_width({"layer1": 0.25})
    ((0.5, {}), (0.5, {'layer1': 8}), (1.0, {'layer1': 0.25}))
    """
    if not isinstance(width, Mapping):
        if isinstance(width, nn.Module):
            raise SurgeryError(
                f"width is a share in (0, 1], got a {type(width).__name__}: pass a smaller model as `like`",
                code="argument",
            )
        if not _is_share(width):
            several = isinstance(width, Integral) and int(width) > 1 and not isinstance(width, bool)
            hint = f", or {{'*': {width}}} for {width} positions of every width" if several else ""
            raise SurgeryError(
                f"width is a share in (0, 1], or shares by name {{'layer1': 0.5}}{hint}; got {width!r:.60}",
                code="argument",
            )
        return width, {}
    rates: dict[str, float | int] = {}
    for pattern, value in width.items():
        if not isinstance(pattern, str):
            raise SurgeryError(
                f"width gives shares by the names of modules, got {pattern!r} as a name", code="argument"
            )
        if isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1:
            rates[pattern] = int(value)
        elif _is_share(value) and not isinstance(value, Integral):
            rates[pattern] = value
        else:
            raise SurgeryError(
                f"width[{pattern!r}] is a share in (0, 1], or a whole number of positions such as 8, got {value!r:.60}",
                code="argument",
            )
    base = rates.pop("*") if [*rates][-1:] == ["*"] and not isinstance(rates["*"], int) else 1.0
    return base, rates


def _is_share(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 < float(value) <= 1


Scores: TypeAlias = Mapping[str, Tensor]
"""Scores [size] by the names of widths. `layer1.conv.weight:0` is the width along axis 0 of this tensor. If several
widths lie along an axis (heads * head dimension), a second number counts them from the left: `proj.weight:1:0`."""


class TracedScores:
    """The caller's scores by axes of a trace.

    They stay valid if widths are unified later.

    Args:
        trace: a trace in which only the forward pass has unified axes.
        scores: scores by width, as `surgery.pruning.importance` returns them.

    Raises:
        SurgeryError: if scores belong to another model, have other lengths, or are not finite.
    """

    def __init__(self, trace: Trace, scores: Any):
        widths, traced_axis = traced_widths(trace)
        self._scores = [(traced_axis[widths[name]], values) for name, values in check_scores(scores, widths).items()]

    def __call__(self, solution: Solution) -> dict[Atom, Tensor]:
        """Return the scores of each atom of a solution of the trace."""
        scores: dict[Atom, Tensor] = {}
        for axis, values in self._scores:
            for atom, part in onto_atoms(solution.axis_of(axis), values).items():
                scores[atom] = scores.get(atom, 0) + part
        return scores


def traced_widths(trace: Trace) -> tuple[dict[str, Atom], dict[Axis, axes.Axis]]:
    """Return the present widths of a trace by name, and the traced axis of each."""
    solution = solve(trace)
    tensor_axes = [axis for along in trace.tensors.values() for axis in along]
    return named_widths(solution), {solution.axis_of(atom): atom for axis in tensor_axes for atom in axes.atoms(axis)}


def check_scores(scores: Any, widths: Mapping[str, Atom], option: str = "scores") -> dict[str, Tensor]:
    """Return scores as float64 tensors; SurgeryError if names or lengths are wrong."""
    if not isinstance(scores, Mapping):
        raise SurgeryError(
            f"{option} takes scores by width, as surgery.pruning.importance returns them, got {scores!r}",
            code="argument",
        )
    checked = {}
    for name, values in scores.items():
        if name not in widths:
            similar = difflib.get_close_matches(str(name), widths, n=2)
            hint = (
                f"did you mean {' or '.join(map(repr, similar))}?"
                if similar
                else "take surgery.pruning.importance of this model"
            )
            raise SurgeryError(f"{option} has scores of {name!r}, but the model has no such width: {hint}", code="name")
        try:
            values = torch.as_tensor(values).detach().cpu().double()
        except (TypeError, ValueError, RuntimeError) as error:
            raise SurgeryError(f"scores of {name!r} are no numbers: {first_line(error)}", code="argument") from error
        if tuple(values.shape) != (widths[name].size,):
            raise SurgeryError(
                f"{option} has scores of shape {tuple(values.shape)} for {name!r}, a width of {widths[name].size} "
                "positions: take surgery.pruning.importance of this model",
                code="mismatch",
            )
        if not values.isfinite().all():
            raise SurgeryError(f"scores of {name!r} are not finite: {values.tolist()[:4]}, ...", code="values")
        checked[name] = values
    return checked


def best(score: Callable[[Atom], Tensor]) -> Callable[[Atom, int], Sequence[int]]:
    """Return a function that picks the n positions with the highest scores.

    Of equal scores it takes the first. A width whose order matters (`Atom.order`) keeps its first positions.
    """

    def pick(atom: Atom, n: int) -> Sequence[int]:
        if atom.order:
            return range(n)
        return sorted(score(atom).argsort(descending=True, stable=True)[:n].tolist())

    return pick


def scores_of(atom: Atom, scores: Mapping[Atom, Tensor], solution: Solution) -> Tensor:
    """Return the scores of an atom; SurgeryError if there are none.

    An atom of one position needs no scores.
    """
    if atom.size == 1:
        return torch.zeros(1)
    if atom not in scores:
        name = next(name for name, other in named_widths(solution).items() if other is atom)
        raise SurgeryError(
            f"scores has none for the width {name!r}, which must shrink: add scores of another criterion, "
            "{**importance(by='l1', ...), **scores}, or name its module in keep",
            code="argument",
        )
    return scores[atom]


INSIDE = Why(ReasonKind.ASKED, "it separates heads, and heads='inside' keeps all of them")


class Chosen(NamedTuple):
    """A choice, with its reasons.

    Attributes:
        choice: the positions that stay.
        reasons: why atoms keep their size, where the trace alone has no reason.
        sliced: the atoms that may shrink.
    """

    choice: Choice
    reasons: Mapping[Atom, Why]
    sliced: Collection[Atom]

    def why(self, atom: Atom) -> Why | None:
        """Return why an atom must keep its size."""
        return self.reasons.get(atom) or atom.why


def choose(solution: Solution, demand: Demand) -> Chosen:
    """Choose positions so that every width shrinks to its share.

    If a width is a product (heads * head dimension, groups * channels within a group), exactly one digit shrinks.
    Products may share digits, so we choose the cheapest combination of digits for all of them together. A width that no
    layer makes (the rows of a table) keeps its size. The axes of inputs and outputs keep their sizes, too.
    """
    _check_used(solution, demand)
    reasons = _reasons_to_keep(solution, demand)
    if demand.choice is not None:
        _check_choice(solution, demand.choice, reasons)
        return Chosen(demand.choice, reasons, [*demand.choice])
    while True:
        sliced = _find_sliced(solution, demand, reasons)
        numbers = demand.numbers(sliced) if demand.numbers else {atom: demand.count_kept(atom) for atom in sliced}
        choice = {atom: demand.pick(atom, n) for atom, n in numbers.items() if n < atom.size}
        out_of_order = [(axis, why) for axis, why in solution.ordered if not _keeps_first(axis, choice)]
        if not out_of_order:
            chosen = Chosen(choice, reasons, sliced)
            _check_numbers(solution, demand, chosen)
            return chosen
        for axis, order in out_of_order:
            why = role(f"{order}; the positions that stay would not be the first ones")
            reasons.update({atom: why for atom in atoms(axis) if atom not in reasons})


def _check_used(solution: Solution, demand: Demand) -> None:
    """Raise SurgeryError if a pattern of `width` has no effect."""
    for pattern in demand.rates:
        matched_axes = [(module, axis) for module, axis in solution.made if matches(module, pattern)]
        decided = [(module, axis) for module, axis in matched_axes if demand.pattern_of(module) == pattern]
        free = [module for module, axis in decided if not is_whole(axis)]
        if any(not any(matches(module, keep_pattern) for keep_pattern in demand.keep) for module in free):
            continue
        why = "no module that it matches makes a width"
        if matched_axes and not decided:
            why = "an earlier pattern matches the same modules"
        elif free:
            why = f"keep={list(demand.keep)} keeps all that it matches"
        elif decided:
            why = next(atom.why.text for _, axis in decided for atom in atoms(axis))
            why += ": name a hidden layer; surgery.widths lists them"
        raise SurgeryError(f"width[{pattern!r}] has no effect: {why}", code="argument")


def _check_numbers(solution: Solution, demand: Demand, chosen: Chosen) -> None:
    """Raise SurgeryError if an axis does not keep the number of positions asked for.

    Axes of inputs and outputs, and axes that `keep` names, are excused, since they must not shrink.
    """
    for module, axis in solution.made:
        pattern = demand.pattern_of(module)
        n = demand.rates[pattern] if pattern is not None else None
        if not isinstance(n, int) or not any(demand.made[module, atom] == axis.size for atom in atoms(axis)):
            continue
        reasons = [chosen.why(atom) for atom in atoms(axis)]
        excused = all(why and why.kind >= ReasonKind.ASKED and why is not INSIDE for why in reasons)
        if (size := size_of(axis, chosen.choice)) == n or excused:
            continue
        text = f"width[{pattern!r}] asks for {n} positions of the {axis.size} that {module!r} makes"
        raise SurgeryError(f"{text}{_why_not(axis, n, size, chosen)}", code="width")


def _why_not(axis: Axis, n: int, size: int, chosen: Chosen) -> str:
    """Return why an axis cannot keep n positions, and which numbers it can keep."""
    if n > axis.size:
        return ": narrow only drops positions, use surgery.widening.widen to add some"
    shrinking = [atom for atom in dict.fromkeys(atoms(axis)) if atom in chosen.sliced]
    if not shrinking:
        reasons = [why.text for atom in atoms(axis) if (why := chosen.why(atom))]
        return f", but all of them stay: {reasons[0] if reasons else 'other widths shrink in its place'}"

    def fits(number: int) -> bool:
        choice = {atom: range(math.ceil(round(number / axis.size * atom.size, 9))) for atom in shrinking}
        return size_of(axis, choice) == number

    nearest = [next(filter(fits, numbers), 0) for numbers in (range(n, 0, -1), range(n, axis.size + 1))]
    return (
        ", but it cannot keep this number (its heads, groups or other parts keep equal numbers, or several widths lie "
        f"along it): give {' or '.join(str(number) for number in nearest if number)}, or a share"
    )


def _reasons_to_keep(solution: Solution, demand: Demand) -> dict[Atom, Why]:
    """Return why the widths that `keep` names must stay."""
    reasons = {}
    for pattern in demand.keep:
        tensors = [tensor_axes for (module, _), tensor_axes in solution.tensors.items() if matches(module, pattern)]
        made_axes = [axis for module, axis in solution.made if matches(module, pattern)]
        for axis in (*made_axes, *(axis for tensor_axes in tensors for axis in tensor_axes)):
            reasons.update(dict.fromkeys(atoms(axis), Why(ReasonKind.ASKED, f"keep={pattern!r} asks for it")))
    return reasons


def _check_choice(solution: Solution, choice: Choice, reasons: Mapping[Atom, Why]) -> None:
    """Raise SurgeryError if positions cut a fixed width, or an ordered one's start."""
    names = {atom: name for name, atom in named_widths(solution).items()}
    for atom in choice:
        if atom in reasons:
            raise SurgeryError(
                f"positions names {names[atom]!r}, but all of its positions stay: {reasons[atom].text}", code="width"
            )
    for axis, why in solution.ordered:
        if not _keeps_first(axis, choice):
            name = next(names[atom] for atom in atoms(axis) if atom in choice)
            raise SurgeryError(
                f"positions of {name!r} must keep the first ones of an axis of {axis.size}: {why}", code="width"
            )


def _keeps_first(axis: Axis, choice: Choice) -> bool:
    """Return whether the first positions of an axis stay, without a gap."""
    if is_whole(axis) or not any(atom in choice for atom in atoms(axis)):
        return True
    runs = runs_of(axis, choice)
    return len(runs) == 1 and runs[0][0] == 0


def _find_sliced(solution: Solution, demand: Demand, reasons: dict[Atom, Why]) -> list[Atom]:
    """Return the atoms that shrink, in the model's order.

    These are atoms that are no digit of a product, and one digit of each product.
    """
    single: dict[Atom, None] = {}
    bound: set[Atom] = set()  # atoms inside of a digit: they shrink if the digit is chosen
    products: dict[_Digits, None] = {}  # for each product the digits that may shrink

    def is_free(atom: Atom) -> bool:
        return not atom.why and atom not in reasons

    def visit(axis: Axis) -> None:
        for term in terms(axis):
            free = [digit for digit in digits(term) if any(map(is_free, atoms(digit)))]
            for digit in free:
                if isinstance(digit, Sum):
                    visit(digit)
            if demand.heads == "inside" and all(grouping_of(digit) == "heads" for digit in free):
                # One number for each head (such as attention sinks), perhaps as (head of keys, query of its group).
                reasons.update({atom: INSIDE for digit in free for atom in atoms(digit)})
            elif len(free) > 1:
                products[tuple(free)] = None
                bound.update(atom for digit in free if isinstance(digit, Sum) for atom in atoms(digit))
            elif free and isinstance(free[0], Atom):
                single[free[0]] = None

    for tensor_axes in solution.tensors.values():
        for axis in tensor_axes:
            visit(axis)
    sliced: set[Atom | Sum] = {
        atom for atom in single if atom not in bound and not any(atom in product for product in products)
    }
    for component in _components(list(products)):
        covers = [
            _Cover(chosen, component, single.keys(), solution.written, demand) for chosen in exact_covers(component)
        ]
        if covers:
            sliced.update(min(covers, key=_Cover.cost).digits)
            continue
        shapes = dict.fromkeys(" * ".join(str(d.size) for d in product) for product in component)
        sizes = ", ".join([*shapes][:4])
        why = lost(f"widths of {sizes} share digits, but no choice of digits shrinks each exactly once")
        reasons.update({atom: why for digit in _find_left_out(component, demand) for atom in atoms(digit)})
        return _find_sliced(solution, demand, reasons)
    shrinks = {atom for digit in sliced for atom in atoms(digit) if is_free(atom)}
    return [atom for atom in solution.members if atom in shrinks]


_Digits: TypeAlias = tuple[Atom | Sum, ...]


class _Cover(NamedTuple):
    """A choice of one digit of each of some products, with the data for its cost."""

    digits: _Digits
    products: Sequence[_Digits]
    single: Collection[Atom]  # atoms that are no digit of a product elsewhere
    written: Collection[Axis]  # digits with a size in a reshape that leaves another size open
    demand: Demand

    def cost(self) -> tuple[int, int, int, float, int, int]:
        """Return the cost; costs are compared entry by entry.

        The entries are: the number of heads (negative if heads are dropped), the widths elsewhere that would keep their
        size, the digits in `written`, the distance from the share that the caller asked for, the number of groups, and
        the places of the digits (later digits are cheaper).
        """
        heads = sum(grouping_of(digit) == "heads" for digit in self.digits)
        groups = sum(grouping_of(digit) == "groups" for digit in self.digits)
        others = dict.fromkeys(digit for product in self.products for digit in product)
        unshrunk = sum(digit in self.single and digit not in self.digits for digit in others)
        minor = sum(product.index(digit) for product in self.products for digit in product if digit in self.digits)
        written = sum(digit in self.written for digit in self.digits)
        return -heads if self.demand.heads == "drop" else heads, unshrunk, written, self.deviation(), groups, -minor

    def deviation(self) -> float:
        """Return how far the products' new sizes are from their shares, relatively."""
        total = 0.0
        for product in self.products:
            size = math.prod(digit.size for digit in product)
            digit = next(digit for digit in product if digit in self.digits)
            atom = next(atoms(digit))
            new_size = size // digit.size * self.demand.count_kept(atom, digit.size)
            total += abs(new_size - self.demand.count_kept(atom, size)) / size
        return total


def exact_covers(products: Sequence[Sequence]) -> Iterator[tuple]:
    """Yield every choice of elements that takes exactly one element of each product.

    An element that occurs twice in a product is not chosen.

    >>> list(exact_covers([("a", "b"), ("b", "c")]))
    [('a', 'c'), ('b',)]
    """
    twice = {digit for product in products for digit in product if list(product).count(digit) > 1}

    def extend(chosen: tuple, banned: set, remaining: list[Sequence]) -> Iterator[tuple]:
        if not remaining:
            yield chosen
            return
        options = [[digit for digit in product if digit not in banned] for product in remaining]
        for digit in min(options, key=len):
            covered = {other for product in remaining if digit in product for other in product}
            yield from extend((*chosen, digit), banned | covered, [p for p in remaining if digit not in p])

    yield from extend((), twice, list(products))


def _find_left_out(products: Sequence[_Digits], demand: Demand) -> set[Atom | Sum]:
    """Return digits that stay, since no choice takes exactly one of each product.

    The digit that is in most products shrinks (if there are several, the longest). The other digits of these products
    stay. If every digit would shrink some product more than once, all stay.
    """
    count = Counter(digit for product in products for digit in set(product))
    twice = {digit for product in products for digit in product if product.count(digit) > 1}
    inside = demand.heads == "inside"
    able = [digit for digit in count if digit not in twice and not (inside and grouping_of(digit) == "heads")]
    main = max(able, key=lambda digit: (count[digit], digit.size), default=None)
    if main is None:
        return {*count}
    return {digit for product in products if main in product for digit in product} - {main}


def _components(products: list[_Digits]) -> list[list[_Digits]]:
    """Return the products in groups; products of different groups share no digit."""
    components: list[list[_Digits]] = []
    for product in products:
        touching = [c for c in components if any(d in other for other in c for d in product)]
        components = [c for c in components if not any(c is t for t in touching)]
        components.append([p for c in touching for p in c] + [product])
    return components
