"""The configuration of a model of another depth: whether it still describes it."""

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from surgery.errors import first_line
from surgery.plain import is_plain
from surgery.states import shapes_of
from surgery.transformers.settings import (
    Fields,
    describe_mismatch,
    field,
    fields,
    first_difference,
    holder_of,
    make_from,
    mismatch,
    other_numbers,
    reread,
    set_field,
)

_log = logging.getLogger(__name__)


def depth_edits(
    before: nn.Module, after: nn.Module, moves: Sequence[tuple[int, Sequence[int]]]
) -> Sequence[Mapping[str, Any]]:
    """Return edits by which a configuration describes its model of another depth.

    Counts of blocks have followed already. Lists with an entry for each block follow where the class then makes this
    model, and does not make it otherwise: their names do not say what they list (`attention_window`). If the
    configuration described the model before, and cannot now, a warning is logged. Numbers that differed before, as
    those do that a forward pass sets, may differ now.

    Args:
        moves: for each section that changes how many blocks it had, and which of them each new block is or repeats.
    """
    holder = str(holder_of(after))
    try:
        twin = make_from(type(before), reread(getattr(before, holder)))
    except Exception:  # it was not made so: whatever its constructor raises
        return []
    if first_difference(shapes_of(before), shapes_of(twin)):
        return []
    known = {key for key, _ in other_numbers(before, twin)}

    def difference(config: Any) -> str:
        try:
            return mismatch(after, make_from(type(after), reread(config)), but=known)
        except Exception as error:
            return f"its class raises {type(error).__name__} for it: {first_line(error)}"

    config = getattr(after, holder)
    reason = difference(config)
    lists = list(_lists(config, moves)) if reason else []
    for chosen in [*([entry] for entry in lists), lists] if lists else []:
        tried = copy.deepcopy(config)
        for path, value in chosen:
            set_field(tried, path, value)
        if not difference(tried):
            paths = [(".".join((holder, *path)), value) for path, value in chosen]
            return [{"do": "set", "module": "", "attribute": path, "value": [*value]} for path, value in paths]
    if reason:
        hint = "give example=..., if you did not: it may show a form that the configuration can describe"
        _log.warning(describe_mismatch(after, reason, hint))
    return []


def _lists(config: Any, moves: Sequence[tuple[int, Sequence[int]]]) -> Iterator[tuple[Fields, list | tuple]]:
    """Yield (place, new value) of lists as long as a section was; none inside dicts.

    >>> from types import SimpleNamespace
    >>> list(_lists(SimpleNamespace(window=[4, 8], sizes=(1, 2, 3)), [(2, [0, 1, 1])]))
    [(('window',), [4, 8, 8])]
    """
    for path, value in fields(config):
        is_list = isinstance(value, list | tuple) and is_plain(value)
        if is_list and not any(isinstance(field(config, path[:i]), dict) for i in range(len(path))):
            yield from (
                (path, type(value)(value[i] for i in places)) for blocks, places in moves if blocks == len(value)
            )
