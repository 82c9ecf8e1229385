"""Why positions of an axis must stay."""

from enum import IntEnum
from typing import NamedTuple


class Kind(IntEnum):
    """What kind of reason it is, from the one that could be mended most easily to the one that cannot be otherwise."""

    LOST = 1
    """An operation cannot be followed: there is no rule for it, or the algebra of axes cannot express what it does."""
    PICKED = 2
    """The network tells positions apart by their number, their order or by data."""
    ROLE = 3
    """Each position has a role of its own: in a window, in a table, as one of several stacked tensors."""
    UNMADE = 4
    """No layer with weights makes the axis: it counts tokens, pixels or rows."""
    ASKED = 5
    """The caller asked for it."""
    OUTPUT = 6
    """It is an axis of what the model returns."""
    INPUT = 7
    """It is an axis of what the model is given."""


class Why(NamedTuple):
    """A reason, and its kind. Of several reasons the one of the highest kind counts: it holds whatever is mended."""

    kind: Kind
    text: str


def lost(text: str) -> Why:
    """An operation cannot be followed."""
    return Why(Kind.LOST, text)


def picked(text: str) -> Why:
    """The network tells positions apart by their number, their order or by data."""
    return Why(Kind.PICKED, text)


def role(text: str) -> Why:
    """Each position has a role of its own."""
    return Why(Kind.ROLE, text)


def firmest(*reasons: Why | None) -> Why | None:
    """The reason that counts, the first of those of the highest kind; None if there is none.

    >>> firmest(None, lost("no rule for it"), role("a window slides over it")).text
    'a window slides over it'
    """
    return max((why for why in reasons if why), key=lambda why: why.kind, default=None)
