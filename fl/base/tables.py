"""Tables: as aligned text, and as CSV files."""

import csv
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from fl.base.files import replacing

WIDTH = 160
"""Characters of a line of a table in a file."""
_SHORT = 24  # characters of a first column that may stand in each part of a table


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file atomically: a line of headings, then a line for each row."""
    with replacing(path) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def align_columns(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lay out cells as text in columns, two characters wider than their longest cell.

    Args:
        lines: cells, equally many in each line.
        left: how many of the columns, from the first, are aligned to the left; the others are aligned to the right.

    >>> print(align_columns([["method", "seeds"], ["fedavg", "2"]]))
    method    seeds
    fedavg        2
    """
    widths = _widths(lines)
    return "\n".join(
        "".join(map(str.ljust, line[:left], widths)) + "".join(map(str.rjust, line[left:], widths[left:]))
        for line in lines
    )


def wrap_columns(lines: Sequence[Sequence[str]], width: int = WIDTH) -> str:
    """Lay out cells in columns as wide as the page.

    Columns that do not fit follow below, beside the first column again. If the first column would take more than a
    third of the width, its cells get numbers, which a table before explains.

    >>> print(wrap_columns([["method", "seeds"], ["fedavg", "2"]]))
    method    seeds
    fedavg        2
    """
    widths = _widths(lines)
    if sum(widths) > width and widths[0] > max(width // 3, _SHORT):
        numbers = ["#", *map(str, range(1, len(lines)))]
        legend = align_columns([[number, line[0]] for number, line in zip(numbers, lines)], left=2)
        text = wrap_columns([[number, *line[1:]] for number, line in zip(numbers, lines)], width)
        return "\n".join(map(str.rstrip, legend.splitlines())) + f"\n\n{text}"
    fit = max(2, sum(total <= width for total in accumulate(widths)))
    text = align_columns([line[:fit] for line in lines])
    rest = [[line[0], *line[fit:]] for line in lines]
    return text if len(rest[0]) == 1 else f"{text}\n\n{wrap_columns(rest, width)}"


def fit_terminal(lines: Sequence[Sequence[str]]) -> str:
    """Lay out cells as `wrap_columns` does, to fit a terminal, with bold headings.

    Where they do not fit, columns in which all rows are equal are listed below the table instead.
    """
    if not sys.stdout.isatty():
        return wrap_columns(lines)
    width, below = shutil.get_terminal_size().columns, ""
    if sum(_widths(lines)) > width and len(lines) > 2:
        first, *columns = zip(*lines)
        alike = [f"{name} {value}" for name, value, *rest in columns if {value} == {*rest}]
        lines = [*zip(first, *(column for column in columns if len({*column[1:]}) > 1))]
        below = "\n" + textwrap.fill(f"all rows: {', '.join(alike)}", width) if alike else ""
    text = wrap_columns(lines, width)
    text = text if "NO_COLOR" in os.environ else re.sub(r"(?:^|(?<=\n\n)).+", "\033[1m\\g<0>\033[0m", text)
    return text + below


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) + 2 for column in zip(*lines)]
