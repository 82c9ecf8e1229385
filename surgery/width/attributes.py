"""Find the numbers of a narrower model's attributes: those read, and labels."""

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import nn

from surgery.names import outwards
from surgery.width.constants import COUNT, NewSizes, SizeChanges, merge_sizes, together
from surgery.width.provenance import Expression, Number, Operation, Place, evaluate, numbers, places, solve_for_places
from surgery.width.scales import Scales
from surgery.width.solve import Choice, Solution, size_of

Values: TypeAlias = dict[tuple[str, str], Any]
"""By (module, attribute) the new value of an attribute that changes."""


def attribute_values(
    model: nn.Module, solution: Solution, choice: Choice, scales: Scales, by_module: Mapping[str, NewSizes]
) -> list[Values]:
    """Return new values of attributes, in the order in which to try them.

    Operations have shown which axis has a number as its size, or what the number scales. A label is a number that no
    operation takes: it follows where it says how wide its module is. A number that the code compared with another one
    may be the size of a width, or of an image; and as a label may be as large as a width by chance, the last values
    have none.

    Args:
        scales, by_module: what numbers become that scale sums, and by module what others do, see `new_sizes`.
    """
    held = {place: holder[key] for holder, key, place in numbers(model)}
    values: dict[Place, Number] = {}
    for place, value in held.items():
        several = isinstance(value, list | tuple)
        values |= {place._replace(item=i): number for i, number in enumerate(value)} if several else {place: value}
    sizes: dict[str, list[NewSizes]] = defaultdict(list)
    for name, of_module in by_module.items():
        for around in outwards(name):
            sizes[around].append(of_module)
    known = {name: together(several) for name, several in sizes.items()}

    def is_width(place: Place) -> bool:
        value = values[place]
        return place.module in known and bool(_news(known[place.module].numbers, value) - {value})

    read = list(_read(solution, choice, scales, values))
    taken = {place for expression, *_ in solution.reads for place in places(expression)}
    labels = _select_changed(
        held, dict(_labels({place: values[place] for place in values if place not in taken}, known))
    )
    alone, with_compared = (
        _select_changed(held, solve_for_places([*read, *more], values, is_width))
        for more in ([], _follow_compared(solution, values, known))
    )
    tries = [alone | labels, with_compared | labels, alone]
    return [new_values for i, new_values in enumerate(tries) if new_values not in tries[:i]]


def _read(
    solution: Solution, choice: Choice, scales: Scales, values: Mapping[Place, Number]
) -> Iterator[tuple[Expression, Number]]:
    """Yield (expression, new value) of each expression that operations took.

    It is the new size of an axis, the new scale, or the old value.
    """
    new_values: dict[Expression, set[Number]] = defaultdict(set)  # by what scales, or is scaled as it is
    stay: list[tuple[Expression, Number]] = []
    for expression, axes, steps in solution.reads:
        value = evaluate(expression, values)
        lengths: dict[int, set[int]] = merge_sizes(scales.lengths(step) for step in steps)
        if any(solution.steps[step].name != "div" for step in steps):  # by a length as it is the code divides
            lengths = {old: news for old, news in lengths.items() if old != value}
        if parts := list(_lengths_in(expression, lengths, values)):  # a scale that the code computes of a length
            for part, new in parts:
                new_values[part].add(new)
            continue
        sizes, scaled = (
            {size_of(axis, choice) for axis in axes},
            {n for step in steps for n in scales.find_new_values(step, value)},
        )
        if scaled or (steps and isinstance(value, float)):
            new_values[expression] |= scaled | sizes or {value}
        elif len(sizes) == 1:
            yield expression, sizes.pop()
        elif steps:
            stay.append((expression, value))
    # what several share follows if all ask the same
    yield from ((expression, news.pop()) for expression, news in new_values.items() if len(news) == 1)
    yield from stay


def _lengths_in(
    expression: Expression, lengths: Mapping[int, set[int]], values: Mapping[Place, Number]
) -> Iterator[tuple[Expression, Number]]:
    """Yield (part, new value) of an expression's largest parts that are sums' lengths."""
    if not isinstance(expression, Place | Operation):
        return
    is_number = isinstance(expression, Place) and (
        isinstance(values[expression], float) or _NO_WIDTH.search(expression.attribute)
    )
    news = () if is_number else lengths.get(evaluate(expression, values), ())  # type: ignore[call-overload, arg-type]
    if len(news) == 1:
        yield expression, next(iter(news))
    elif isinstance(expression, Operation):
        yield from _lengths_in(expression.left, lengths, values)
        yield from _lengths_in(expression.right, lengths, values)


def _follow_compared(
    solution: Solution, values: Mapping[Place, Number], known: Mapping[str, NewSizes]
) -> Iterator[tuple[Expression, Number]]:
    """Yield (expression, new value) of each expression that the code compared.

    It becomes what a width of its module becomes, or of a module around it.
    """
    for expression in solution.compared:
        old = evaluate(expression, values)
        names = dict.fromkeys(around for place in places(expression) for around in outwards(place.module))
        options = (_news(known[name].numbers, old) - {old} for name in names if name in known)
        news = next(filter(None, options), {old})
        if len(news) == 1:
            yield expression, news.pop()


def _news(sizes: SizeChanges, value: Number) -> set[Number]:
    """Return what sizes that equal a value become."""
    return {new for old, news in sizes.items() if old == value for new in news}


def _select_changed(held: Mapping[Place, Any], new_numbers: Mapping[Place, Number]) -> Values:
    """Return the attributes with other numbers than they hold."""
    changed: Values = {}
    for place, value in held.items():
        if isinstance(value, list | tuple):
            old: Any = list(value)
            new: Any = [new_numbers.get(place._replace(item=i), number) for i, number in enumerate(value)]
        else:
            old, new = value, new_numbers.get(place, value)
        if new != old:
            changed[place.module, place.attribute] = new
    return changed


def _labels(unread: Mapping[Place, Number], known: Mapping[str, NewSizes]) -> Iterator[tuple[Place, Number]]:
    """Yield (place, new value) of unread numbers that say how wide their module is.

    They are as large as exactly one width of their module, or a scale that an operation of it computes by itself. What
    a configuration says is found by its class, see `surgery.transformers.width`.
    """
    for place, value in unread.items():
        sizes, news = known.get(place.module), set[Number]()
        if sizes is None or "." in place.attribute or place.attribute.startswith("_"):
            continue
        if isinstance(value, float):
            news = {new for old, new in sizes.scales if math.isclose(old, value, rel_tol=1e-9)}
        elif COUNT.search(place.attribute):
            news = _news(sizes.counts, value)
        elif value >= _LEAST and not _NO_WIDTH.search(place.attribute):
            news = _news(sizes.widths, value)
        if len(news) == 1:
            yield place, news.pop()


_LEAST = 8  # smaller numbers may well mean something else
_NO_WIDTH = re.compile(
    r"stride|kernel|patch|window|grid|ima?ge?_|resol|ratio|max_|min_"
    r"|(^|_)pad_|(^|_)(length|len|depth|layers|classes|steps|stages|pad|padding|value|tokens?|index)$"
)
"""Names of attributes that are no widths, though they may be as large as one by chance."""
