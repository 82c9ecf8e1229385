"""Tables: as aligned text, and as CSV files."""

import csv
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path

from fl.base.files import replacing

WIDTH = 160
"""Characters of a line of a table in a file."""


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Write a CSV file atomically: a line of headings, then a line for each row."""
    with replacing(path) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def aligned(lines: Sequence[Sequence[str]], left: int = 1) -> str:
    """Lay out cells as text in columns, each as wide as its longest cell and two characters more.

    Args:
        lines: cells, equally many in each line.
        left: how many of the columns, from the first, are aligned to the left; the others are aligned to the right.

    >>> print(aligned([["method", "seeds"], ["fedavg", "2"]]))
    method    seeds
    fedavg        2
    """
    widths = _widths(lines)
    return "\n".join(
        "".join(map(str.ljust, line[:left], widths)) + "".join(map(str.rjust, line[left:], widths[left:]))
        for line in lines
    )


def wrapped(lines: Sequence[Sequence[str]], width: int = WIDTH) -> str:
    """Lay out cells in columns; those that do not fit into the width follow below, beside the first column again.

    >>> print(wrapped([["method", "seeds"], ["fedavg", "2"]]))
    method    seeds
    fedavg        2
    """
    fit = max(2, sum(total <= width for total in accumulate(_widths(lines))))
    text = aligned([line[:fit] for line in lines])
    rest = [[line[0], *line[fit:]] for line in lines]
    return text if len(rest[0]) == 1 else f"{text}\n\n{wrapped(rest, width)}"


def fitted(lines: Sequence[Sequence[str]]) -> str:
    """Lay out cells as `wrapped` does, to fit the terminal if the output goes to one.

    Names in the first column that take more than half of it are shortened, and a line below says so.
    """
    width = _terminal()
    if width is None:
        return wrapped(lines)
    short = _shortened([line[0] for line in lines], width // 2)
    text = wrapped([[name, *line[1:]] for name, line in zip(short, lines)], width)
    cut = any(name != line[0] for name, line in zip(short, lines))
    note = "(names are shortened to fit the terminal: a wider one, or `| cat` after the command, shows everything)"
    return f"{text}\n\n{textwrap.fill(note, width, break_on_hyphens=False)}" if cut else text


def _terminal() -> int | None:
    """Count the columns of the terminal that the output goes to; None if it goes into a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _shortened(names: Sequence[str], most: int) -> list[str]:
    """Cut the middle out of names that are longer than `most`; none if two would become one.

    >>> _shortened(["runs/fedmr-digits-seed0", "runs/a"], 13), _shortened(["a_long_0_name", "a_long_1_name"], 8)
    (['runs/f…-seed0', 'runs/a'], ['a_long_0_name', 'a_long_1_name'])
    """
    most = max(most, 3)
    head, tail = most // 2, most - most // 2 - 1
    cut = [name if len(name) <= most else f"{name[:head]}…{name[-tail:]}" for name in names]
    return cut if len(set(cut)) == len(set(names)) else list(names)


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) + 2 for column in zip(*lines)]
