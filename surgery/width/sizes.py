"""What the sizes along an axis become. Code may store the size of several consecutive digits or terms as one number."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from surgery.width.solved import Axis, Choice, Sum, atoms, digits, grouping_of, size_of, terms
from surgery.width.why import Kind

Sizes = dict[int, set[int]]  # old size -> what axes of that size become


def add_all(found: Sizes, axis: Axis, choice: Choice) -> None:
    """The sizes of an axis and of all its parts."""
    for part in _parts(axis):
        _add(found, part, choice)


def add_widths(found: Sizes, axis: Axis, choice: Choice) -> None:
    """The sizes of features: not of the digits that tell heads or groups apart."""
    for part in _parts(axis):
        if not (_grouping(part) and len(part.whole) > 1):
            _add(found, part, choice)


def add_changes(found: Sizes, axis: Axis, choice: Choice) -> None:
    """The sizes of features that shrink."""
    for part in _parts(axis):
        if not (_grouping(part) and len(part.whole) > 1) and any(size_of(d, choice) != d.size for d in part.digits):
            _add(found, part, choice)


def add_counts(found: Sizes, axis: Axis, choice: Choice) -> None:
    """The numbers of heads and groups."""
    for part in _parts(axis):
        if _grouping(part):
            _add(found, part, choice)


class _Part(NamedTuple):
    """Consecutive digits of an axis, and all of its digits."""

    digits: list[Axis]
    whole: list[Axis]


def _parts(axis: Axis) -> Iterator[_Part]:
    """The axis, each stretch of its consecutive digits, and the same for the terms of each digit."""
    own = digits(axis)
    stretches = [own[i:j] for i in range(len(own)) for j in range(i + 1, len(own) + 1)]
    for stretch in stretches or [[axis]]:
        if len(stretch) == 1 or not any(map(_is_of_input, stretch)):
            yield _Part(stretch, own)
    for digit in own:
        if isinstance(digit, Sum):
            for term in dict.fromkeys(terms(digit)):
                yield from _parts(term)


def _is_of_input(digit: Axis) -> bool:
    return all(atom.why and atom.why.kind is Kind.INPUT for atom in atoms(digit))


def _grouping(part: _Part) -> bool:
    """Whether it is a single digit that tells heads or groups apart."""
    return len(part.digits) == 1 and bool(grouping_of(part.digits[0]))


def _add(found: Sizes, part: _Part, choice: Choice) -> None:
    old = math.prod(d.size for d in part.digits)
    found.setdefault(old, set()).add(math.prod(size_of(d, choice) for d in part.digits))


def merged(several: Iterable[Sizes]) -> Sizes:
    """The sizes of several modules, taken together."""
    result: Sizes = {}
    for sizes in several:
        for old, new in sizes.items():
            result.setdefault(old, set()).update(new)
    return result
