"""Values that a configuration may have for a narrower model: its numbers that are sizes of axes that shrink."""

import re
from collections.abc import Collection, Iterator
from typing import Any

from surgery.configuration import Fields, fields
from surgery.width.sizes import Sizes, merged

_WIDTH = re.compile(r"dim|channel|hidden|width|size|embd|inner|feat|planes|d_|ffn|rank")
_COUNT = re.compile(r"heads?$|groups?$")
_FACTOR = re.compile(r"ratio|factor|mult|expan")
_LEAST = 4  # smaller numbers are no widths


def guessed(config: Any, widths: Sizes, counts: Sizes) -> Iterator[tuple[Fields, Any]]:
    """Numbers whose names say that they are widths or count heads, and that become one other number.

    >>> from types import SimpleNamespace
    >>> list(guessed(SimpleNamespace(hidden_size=8, labels=8, num_heads=4), {8: {6}}, {4: {4}}))
    [(('hidden_size',), 6)]
    """
    widths = {size: news for size, news in widths.items() if size >= _LEAST}
    for path, value in fields(config):
        sizes = counts if _COUNT.search(path[-1]) else widths if _WIDTH.search(path[-1]) else {}
        if (new := _renewed(value, sizes)) is not None:
            yield path, new


def alternatives(
    config: Any, original: Any, sizes: Sizes, pairs: Collection[tuple[int, int]], shares: Collection[float]
) -> Iterator[tuple[Fields, Any]]:
    """Other values for one field of a configuration.

    Args:
        config: the configuration to change.
        original: that of the full model; its values are among the alternatives.
        sizes: what sizes become.
        pairs: (size, size that is wanted) of axes of the model made from the configuration.
        shares: how much shorter tables of computed numbers are to be, such as the frequencies of rotary embeddings,
            which are base ** (-position / length) for some base.
    """
    for path, value in fields(config):
        if _is_number(value, float) and value > 1:
            yield from ((path, value**share) for share in sorted(shares))
    old_values = dict(fields(original))
    sizes = merged([sizes, *({got: {want}} for got, want in pairs)])
    for path, value in fields(config):
        old = old_values.get(path, value)
        if _is_number(value, int) and value > 0:
            found = {*sizes.get(value, ()), old}
            if _is_number(old, int):
                found |= sizes.get(old, set())
            yield from ((path, new) for new in sorted(found - {value, None}))
        if _is_list(value):
            yield from ((path, new) for new in _renewed_lists(value, sizes))
        if value is None and _WIDTH.search(path[-1]):
            yield from ((path, want) for want in sorted({want for _, want in pairs}))
        if _is_number(value, int | float) and _FACTOR.search(path[-1]):
            yield from ((path, new) for got, want in sorted(pairs) if (new := _times(value, want, got)))


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(_is_number(item, int) for item in value)


def _renewed(value: Any, sizes: Sizes) -> Any:
    """The number, or the list of numbers, with sizes replaced; None if nothing changes in exactly one way."""
    if _is_list(value):
        new = [_renewed(item, sizes) or item for item in value]
        return type(value)(new) if new != list(value) else None
    changed = sizes.get(value, set()) - {value} if _is_number(value, int) else set()
    return next(iter(changed)) if len(changed) == 1 else None


def _renewed_lists(value: list | tuple, sizes: Sizes) -> Iterator[list | tuple]:
    """The list with all its sizes replaced, then with one of them."""
    if (new := _renewed(value, sizes)) is not None:
        yield new
    for place, item in enumerate(value):
        for size in sorted(sizes.get(item, set()) - {item}):
            yield type(value)([*value[:place], size, *value[place + 1 :]])


def _times(value: float, want: int, got: int) -> float | None:
    """A factor changed by a share; a whole one stays whole."""
    new = value * want / got
    return new if isinstance(value, float) else int(new) if new == int(new) > 0 else None
