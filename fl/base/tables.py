"""Tables: as aligned text, and as CSV files."""

import csv
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from fl.base.files import replacing

WIDTH = 160
"""Characters of a line of `wrapped`."""


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file atomically: a line of headings, then a line for each row."""
    with replacing(path) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def csv_rows(text: str, key: str) -> list[dict[str, str]]:
    """The rows of a CSV file that grows by a line at a time, without a last line that was cut off, perhaps in a number.

    Args:
        text: of the file, with the ends of its lines.
        key: a column that it must have.

    Raises ValueError or csv.Error if the text is no such table.

    >>> csv_rows("round,loss\\n1,0.25\\n2,0.1", "round")
    [{'round': '1', 'loss': '0.25'}]
    """
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        del lines[-1]
    table = csv.DictReader(lines)
    if table.fieldnames and key not in table.fieldnames:
        raise ValueError(f"there is no column {key}")
    return [row for row in table if None not in row.values()]


def aligned(lines: Sequence[Sequence[str]], widths: Sequence[int] = (), left: int = 1) -> str:
    """Cells as text in columns.

    Args:
        lines: cells, equally many in each line.
        widths: characters of each column; by default the longest cell and two more.
        left: how many of the columns, from the first, are aligned to the left; the others are aligned to the right.

    >>> print(aligned([["method", "seeds"], ["fedavg", "2"]]))
    method    seeds
    fedavg        2
    """
    widths = widths or _widths(lines)
    return "\n".join(
        "".join(map(str.ljust, line[:left], widths)) + "".join(map(str.rjust, line[left:], widths[left:]))
        for line in lines
    )


def wrapped(lines: Sequence[Sequence[str]]) -> str:
    """As `aligned`; columns that do not fit into `WIDTH` characters follow below, beside the first column again.

    >>> print(wrapped([["method", "seeds"], ["fedavg", "2"]]))
    method    seeds
    fedavg        2
    """
    first, *widths = _widths(lines)
    fit = max(1, sum(total <= WIDTH for total in accumulate(widths, initial=first)) - 1)
    text = aligned([line[: 1 + fit] for line in lines], [first, *widths[:fit]])
    rest = [[line[0], *line[1 + fit :]] for line in lines]
    return text if fit == len(widths) else f"{text}\n\n{wrapped(rest)}"


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) + 2 for column in zip(*lines)]
