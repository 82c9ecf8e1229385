"""Code that takes two widths of one size for one: which axes these may be."""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

from surgery.names import is_inside
from surgery.width import axes
from surgery.width.solved import Choice, Solution, is_whole, size_of
from surgery.width.trace import Trace


class Place(NamedTuple):
    """An axis of a trace: the number of a step, and of the axis among that step's."""

    step: int
    position: int


Coupling: TypeAlias = tuple[tuple[Place, Place], ...]  # pairs of axes that become one width


def couplings(trace: Trace, solution: Solution, step: int, choice: Choice) -> Iterator[Coupling]:
    """Axes of one size that shrink differently, of what the step's module sees: its code may take them for one width.

    First those of the step itself with others, the shortest first (a head's share of queries and of values); then the
    longest two (a head's share computed from the input's channels), and all axes that are as long as these.
    """
    module = trace.steps[step].module
    found: dict[int, dict[int, Place]] = {}  # by size and new size the first axis that may shrink
    for number, known in enumerate(solution.steps):
        if is_inside(known.module, module):
            for position, axis in enumerate(known.axes()):
                if not is_whole(axis):
                    found.setdefault(axis.size, {}).setdefault(size_of(axis, choice), Place(number, position))
    mine = {axis.size: size_of(axis, choice) for axis in solution.steps[step].axes() if not is_whole(axis)}
    for size in sorted(mine):
        first = found[size][mine[size]]
        yield from (((first, other),) for new, other in found[size].items() if new != mine[size])
    for size in sorted(found, reverse=True):
        first, *others = found[size].values()
        if others:
            yield ((first, others[0]),)
            if len(others) > 1:
                yield tuple((first, other) for other in others)


def couple(trace: Trace, coupling: Coupling) -> None:
    """Unify the axes of a coupling."""
    for a, b in coupling:
        axes.unify(*(trace.steps[place.step].axes()[place.position] for place in (a, b)))
