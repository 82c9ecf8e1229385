"""All columns: of every run, of files of this folder, of methods."""

from collections.abc import Container

from fl.algorithms import ALGORITHMS
from fl.base.columns import Column
from fl.base.errors import FLError
from fl.base.plugins import declared
from fl.runs.columns.moment import Moment
from fl.runs.columns.standard import FIRST, LAST

FOUND: dict[str, Column] = declared("fl.runs.columns", "COLUMN", Column)
"""Those that have a file of their own."""


def columns() -> dict[str, Column]:
    """The columns of metrics.csv by name, from left to right.

    Raises FLError for a method that names one of the others as its own.

    >>> columns()["accuracy"].heading
    'final acc. %'
    """
    common = FIRST | FOUND
    mine: dict[str, Column] = {}
    for name, method in ALGORITHMS.items():
        own = getattr(method, "columns", {})
        if taken := [column for column in own if column in common or column in LAST]:
            raise FLError(f"{name} names {taken[0]!r} as a column of its own, which every run has: choose another name")
        mine |= {key: Column(column) if isinstance(column, type) else column for key, column in own.items()}
    return common | mine | LAST


def measure_columns(moment: Moment, wanted: Container[str]) -> dict[str, float]:
    """The columns that measure themselves and are due.

    Args:
        wanted: what is evaluated after this round beside what is due after every round, see `Column.due`.
    """
    result = {}
    for name, column in columns().items():
        if column.measure and (column.due == "round" or column.due in wanted):
            value = column.measure(moment)
            if value is not None:
                result[name] = column.kind(value)
    return result
