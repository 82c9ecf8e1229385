"""The configuration of a deeper or shallower model: whether its class still makes this model from it."""

import logging

from torch import nn

from surgery.errors import first_line
from surgery.states import shapes_of
from surgery.transformers.settings import (
    first_difference,
    holder_of,
    made_from,
    mismatch,
    other_numbers,
    reread,
    undescribed,
)

_log = logging.getLogger(__name__)


def check_depth(before: nn.Module, after: nn.Module) -> None:
    """Log a warning if its configuration, saved and read, described a model before its depth changed, and does not now.

    Numbers that differed before, as those do that a forward pass sets, may differ now.
    """
    holder = str(holder_of(after))
    try:
        made = made_from(type(before), reread(getattr(before, holder)))
    except Exception:  # it was not made so: whatever its constructor raises
        return
    if first_difference(shapes_of(before), shapes_of(made)):
        return
    known = {key for key, _ in other_numbers(before, made)}
    try:
        what = mismatch(after, made_from(type(after), reread(getattr(after, holder))), but=known)
    except Exception as error:
        what = f"its class raises {type(error).__name__} for it: {first_line(error)}"
    if what:
        hint = "give example=..., if you did not: it may show a form that the configuration can describe"
        _log.warning(undescribed(after, what, hint))
