"""The algebra of axes: learn which positions in which tensors belong together.

An axis is one of three things:
- an *atom*: n positions about which nothing more is known;
- a *product* of digits, as in a mixed radix number: `reshape(B, N, 3, heads, dim)` shows that an axis of
  3 * heads * dim positions has three digits, and the last changes fastest;
- a *sum* of terms, one after the other: `cat` makes one, and `split` or slicing shows one.

`unify` says that two axes are the same, position by position; their digits and terms are then refined until they
agree. `fix` says that every position must stay, and why. What cannot be expressed is fixed, which is always sound.
These axes change while a model is traced; `surgery.width.solve` has what is known at the end.
"""

from collections.abc import Iterator
from enum import IntEnum
from math import prod
from typing import NamedTuple

from surgery.errors import InternalError


class ReasonKind(IntEnum):
    """The kind of a reason, from the easiest to mend to the firmest."""

    LOST = 1
    """An operation cannot be followed: there is no rule for it, or the algebra of axes cannot express what it does."""
    PICKED = 2
    """The network tells positions apart by their number, their order or by data."""
    ROLE = 3
    """Each position has a role of its own: in a window, in a table, as one of several stacked tensors."""
    UNMADE = 4
    """No layer with weights makes the axis: it counts tokens, pixels or rows."""
    PLACE = 5
    """It counts places, of an image or of a window: no width, whoever writes along it."""
    ASKED = 6
    """The caller asked for it."""
    OUTPUT = 7
    """It is an axis of what the model returns."""
    INPUT = 8
    """It is an axis of what the model is given."""


class Why(NamedTuple):
    """A reason and its kind.

    Of several reasons the one of the highest kind counts: it holds whatever is mended.
    """

    kind: ReasonKind
    text: str


def lost(text: str) -> Why:
    """Say that an operation cannot be followed."""
    return Why(ReasonKind.LOST, text)


def picked(text: str) -> Why:
    """Return a reason: positions differ by their number, their order or by data."""
    return Why(ReasonKind.PICKED, text)


def role(text: str) -> Why:
    """Say that each position has a role of its own."""
    return Why(ReasonKind.ROLE, text)


def place(text: str) -> Why:
    """Return the reason of an axis that counts places."""
    return Why(ReasonKind.PLACE, text)


def firmest(*reasons: Why | None) -> Why | None:
    """Return the first reason of the highest kind; None if there is none.

    >>> firmest(None, lost("no rule for it"), role("a window slides over it")).text
    'a window slides over it'
    """
    return max((why for why in reasons if why), key=lambda why: why.kind, default=None)


SHUFFLED = (
    "its parts are joined, interleaved and split again (channel shuffles in a row), so that each would have to keep "
    "other positions"
)


class Axis:
    """A node of a union-find forest; `find` gives the representative of its class."""

    __slots__ = ("grouping", "kind", "link", "parts", "size", "why")

    def __init__(self, size: int, why: Why | None = None, *, kind: str = "atom", parts: tuple["Axis", ...] = ()):
        self.size = size
        self.why = why  # why every position must stay
        self.kind = kind
        self.parts = list(parts)
        self.grouping = ""  # "heads" or "groups" if its positions tell these apart
        self.link: Axis | None = None

    def __repr__(self) -> str:
        axis = find(self)
        if axis.kind == "atom":
            return f"{axis.size}{'!' if axis.why else ''}"
        return "(" + {"product": "*", "sum": "+"}[axis.kind].join(map(repr, axis.parts)) + ")"


def find(axis: Axis) -> Axis:
    """Return the representative of an axis."""
    root = axis
    while root.link is not None:
        root = root.link
    while axis.link is not None:
        axis.link, axis = root, axis.link
    return root


def product(digits: list[Axis]) -> Axis:
    """Return the axis with these digits, most significant first."""
    digits = [digit for digit in digits if digit.size != 1]
    if len(digits) == 1:
        return find(digits[0])
    if not digits:
        return Axis(1)
    return Axis(prod(d.size for d in digits), kind="product", parts=tuple(digits))


def concatenation(terms: list[Axis]) -> Axis:
    """Return the axis with these terms, first to last."""
    terms = [term for term in terms if term.size]
    if len(terms) == 1:
        return find(terms[0])
    return Axis(sum(t.size for t in terms), kind="sum", parts=tuple(terms))


def digits(axis: Axis) -> list[Axis]:
    """Return the digits of an axis and of nested products; a sum is one digit."""
    axis = find(axis)
    if axis.kind == "product":
        return [digit for part in axis.parts for digit in digits(part)]
    return [axis] if axis.size != 1 else []


def terms(axis: Axis) -> list[Axis]:
    """Return the terms of an axis and of nested sums; a product is one term."""
    axis = find(axis)
    if axis.kind == "sum":
        return [term for part in axis.parts for term in terms(part)]
    return [axis]


def atoms(axis: Axis) -> Iterator[Axis]:
    """Yield the atoms of an axis, each as often as it occurs."""
    axis = find(axis)
    if axis.kind == "atom":
        yield axis
    for part in axis.parts:
        yield from atoms(part)


def fix(axis: Axis, why: Why) -> None:
    """Keep every position of this axis; of several reasons the firmest is kept."""
    if not isinstance(why, Why):
        raise InternalError(f"fix: why is role('...'), picked('...') or lost('...'), not {why!r}")
    axis = find(axis)
    if axis.kind == "atom":
        axis.why = firmest(axis.why, why)
    for part in axis.parts:
        fix(part, why)


def is_fixed(axis: Axis) -> bool:
    """Return whether every position of this axis must stay."""
    return all(atom.why for atom in atoms(axis))


def mark_grouping(axis: Axis, grouping: str) -> None:
    """Mark each position of an axis as a head or a group beside the others.

    Args:
        grouping: "heads" or "groups".
    """
    if grouping not in ("heads", "groups"):
        raise InternalError(f"mark_grouping: an axis counts 'heads' or 'groups', not {grouping!r}")
    for digit in digits(axis):
        digit.grouping = digit.grouping or grouping


def split_digit(axis: Axis, major: int) -> tuple[Axis, Axis]:
    """Split a digit into two, the first of size `major`.

    The terms of a sum must then form `major` equal groups.
    """
    axis = find(axis)
    minor = axis.size // major
    if axis.kind == "atom":
        axis.parts = [Axis(major, axis.why), Axis(minor, axis.why)]
        for part in axis.parts:
            part.grouping = axis.grouping
    else:
        groups = [segment(axis, start, start + minor) for start in range(0, axis.size, minor)]
        for group in groups[1:]:
            unify(groups[0], group)
        axis = find(axis)
        axis.parts = [
            Axis(major, role("parts of it are reshaped into one axis, and all of these keep the same positions")),
            groups[0],
        ]
    axis.kind = "product"
    return axis.parts[0], axis.parts[1]


def cut(axis: Axis, at: int) -> None:
    """Make an axis a sum with a boundary at this position."""
    axis = find(axis)
    if at in (0, axis.size):
        return
    if axis.kind == "atom":
        axis.kind, axis.parts = "sum", [Axis(at, axis.why), Axis(axis.size - at, axis.why)]
        for part in axis.parts:
            part.grouping = axis.grouping
        return
    if axis.kind == "product":
        _as_sum(axis, at)
    for term in terms(axis):
        if at < term.size:
            return cut(term, at)
        at -= term.size


def segment(axis: Axis, start: int, stop: int) -> Axis:
    """Return positions start to stop as an axis of their own."""
    axis = find(axis)
    if not 0 <= start <= stop <= axis.size:
        raise InternalError(f"segment: {start} to {stop} are no positions of an axis of {axis.size}")
    if (start, stop) == (0, axis.size):
        return axis
    cut(axis, start)
    cut(axis, stop)
    chosen, position = [], 0
    for term in terms(axis):
        if start <= position and position + term.size <= stop:
            chosen.append(term)
        position += term.size
    return concatenation(chosen)


def unify(a: Axis, b: Axis) -> None:
    """Note that two axes are the same, position by position, in any order.

    Their digits and terms are refined until they agree, and what is fixed of one is fixed of both. Axes that cannot be
    brought together are fixed.

    Raises:
        InternalError: if they differ in size.

    >>> a, b = product([Axis(2), Axis(12)]), product([Axis(8), Axis(3, role("three colours"))])
    >>> unify(a, b)
    >>> a
    ((2*4)*3!)
    >>> joined = concatenation([Axis(2), Axis(10)])
    >>> unify(joined, concatenation([Axis(8), Axis(4)]))
    >>> joined
    ((2+6)+4)
    """
    a, b = find(a), find(b)
    if a is b:
        return
    if a.size != b.size:
        raise InternalError(f"axes of {a.size!r} and {b.size!r} positions are unified")
    if a.kind != "atom" and b.kind == "atom":
        a, b = b, a
    if a.kind != "atom":
        if is_fixed(a) and is_fixed(b):
            return  # what they consist of makes no difference any more
        {("product", "product"): _align_digits, ("sum", "sum"): _align_terms}.get((a.kind, b.kind), _align_mixed)(a, b)
        a, b = find(a), find(b)
        if a is b or (is_fixed(a) and is_fixed(b)):
            return  # axes that do not fit together keep their own parts, so that none takes the other's
    if a.why:
        fix(b, a.why)
    b.grouping = b.grouping or a.grouping
    if a.grouping and b.kind == "product":
        mark_grouping(b, a.grouping)
    a.link = b


def regroup(old: list[Axis], sizes: list[int]) -> list[Axis]:
    """Return the axes after a (row-major) reshape to these sizes.

    Digits are joined and divided: an axis of 12 becomes one of 3 and one of 4, which are its digits from then on. A
    reshape that would take a part of a digit that does not divide it fixes all axes, old and new.

    >>> tokens, features = Axis(5), Axis(12)
    >>> regroup([tokens, features], [5, 3, 4])
    [5, 3, 4]
    >>> features
    (3*4)
    >>> regroup([tokens, features], [15, 4])
    [(5*3), 4]
    >>> regroup([Axis(4), Axis(6)], [6, 4])
    [6!, 4!]
    """
    if 0 in sizes:  # no boxes were found, say: what the other axes are is still known
        rest, others = [axis for axis in old if axis.size], [size for size in sizes if size]
        if prod(axis.size for axis in rest) != prod(others):
            return [Axis(size, role("an empty tensor")) for size in sizes]
        nonempty = iter(regroup(rest, others))
        return [next(nonempty) if size else Axis(0, role("an empty tensor")) for size in sizes]
    if prod(axis.size for axis in old) != prod(sizes):
        raise InternalError(f"regroup: axes {old} have not as many positions as sizes {sizes}")
    queue = [digit for axis in old for digit in digits(axis)]
    if not _fits([digit.size for digit in queue], sizes):
        queue = _merge_fixed(queue)
    result = []
    for size in sizes:
        taken: list[Axis] = []
        have = 1
        while have < size:
            digit = find(queue.pop(0))
            if digit.kind == "product":
                queue[:0] = digits(digit)
                continue
            need = size // have
            if digit.size > need or size % (have * digit.size):
                if size % have or digit.size % need:
                    for axis in old:
                        fix(axis, lost("cannot be followed through a reshape that mixes axes"))
                    return [Axis(size, lost("a reshape that mixes axes")) for size in sizes]
                major, minor = split_digit(digit, need)
                queue[:0] = [*digits(major), *digits(minor)]
                continue
            taken.append(digit)
            have *= digit.size
        result.append(product(taken))
    return result


def _fits(digits: list[int], sizes: list[int]) -> bool:
    """Return whether each of these sizes is a product of digits, or of parts of them."""
    queue = list(digits)
    for size in sizes:
        while size > 1:
            digit = queue.pop(0)
            if size % digit == 0:
                size //= digit
            elif digit % size == 0:
                queue.insert(0, digit // size)
                size = 1
            else:
                return False
    return True


def _merge_fixed(parts: list[Axis]) -> list[Axis]:
    """Merge adjacent fixed digits, since a reshape may mix positions that all stay."""
    result: list[Axis] = []
    for digit in parts:
        if result and is_fixed(digit) and is_fixed(result[-1]):
            # The weakest reason: that one digit belongs to the data says nothing about the other.
            why = min((atom.why for axis in (result[-1], digit) for atom in atoms(axis)), key=lambda why: why.kind)
            result[-1] = Axis(result[-1].size * digit.size, why)
        else:
            result.append(digit)
    return result


def _as_sum(axis: Axis, at: int) -> None:
    """Turn a product into a sum with a boundary at a position, or near it.

    A boundary between positions of the first digit divides that digit: (a + b) * rest is a * rest + b * rest. Another
    one falls into the rest after some position of the first digit; its parts are then used one by one.
    """
    first, *others = digits(axis)
    rest = axis.size // first.size
    position, inside = divmod(at, rest)
    if inside:
        fix(first, role(SHUFFLED))
        parts = [product(others)] * first.size
    else:
        cut(first, position)
        parts = [product([term, *others]) for term in terms(first)]
    axis.kind, axis.parts = "sum", parts


def _align_digits(a: Axis, b: Axis) -> None:
    left, right = digits(a), digits(b)
    while left and right:
        x, y = find(left.pop(0)), find(right.pop(0))
        if x.kind == "product" or y.kind == "product":  # aligning earlier digits may have split them
            left[:0], right[:0] = digits(x), digits(y)
        elif x.size == y.size:
            unify(x, y)
        else:
            larger, smaller, larger_queue, smaller_queue = (
                (x, y, left, right) if x.size > y.size else (y, x, right, left)
            )
            if larger.size % smaller.size:
                for axis in (a, b):
                    fix(axis, lost("cannot be followed through two reshapes that do not fit together"))
                return
            major, minor = split_digit(larger, smaller.size)
            larger_queue[:0] = [*digits(major), *digits(minor)]
            smaller_queue[:0] = digits(smaller)


def _align_terms(a: Axis, b: Axis) -> None:
    left, right = terms(a), terms(b)
    while left and right:
        x, y = find(left.pop(0)), find(right.pop(0))
        if x.kind == "sum" or y.kind == "sum":
            left[:0], right[:0] = terms(x), terms(y)
        elif x.size == y.size:
            unify(x, y)
        else:
            larger, smaller = (x, y) if x.size > y.size else (y, x)
            cut(larger, smaller.size)
            left[:0], right[:0] = terms(x), terms(y)


def _align_mixed(a: Axis, b: Axis) -> None:
    if a.kind == "product":
        a, b = b, a
    cut(b, terms(a)[0].size)
    unify(a, b)


Axes = tuple[Axis, ...]
