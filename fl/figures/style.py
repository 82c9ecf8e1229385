"""What all figures share: colours, the axes of curves, captions, and how a figure is written."""

import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, ScalarFormatter

from fl.analysis.costs import COSTS, unit_for
from fl.base.errors import FLError
from fl.base.files import replacing
from fl.figures.limits import settle
from fl.runs.columns import columns

COLORS = ("#0072b2", "#d55e00", "#009e73", "#000000", "#cc79a7")
"""Of the lines in one panel, from Okabe and Ito: colour-blind people tell them apart."""
GREY = "0.45"
"""Of references."""
_CHARACTERS = 15.5  # of a caption in an inch


def finish(axis: Axes, key: str, along: str = "round") -> None:
    """The axes of the curves of a column, once all of them are drawn."""
    column = columns()[key]
    dress(axis, column.label, percent=column.factor == 100, along=along)
    settle(axis, column)


def dress(axis: Axes, label: str, percent: bool = False, along: str = "round") -> None:
    """Labels, ticks and markers of an axis with curves, whose values may be shares in percent."""
    for line in axis.lines:
        alone = line.get_transform() == axis.transData and line.get_marker() == "None"
        if alone and len(line.get_xdata()) <= 12:  # few points, or a single one, which a line alone would not show
            line.set_marker("o")
            line.set_markersize(3.5)
    axis.set_xlabel(_spent(axis, along) if along in COSTS else along)
    axis.set_ylabel(label)
    if isinstance(axis.yaxis.get_major_formatter(), ScalarFormatter):  # a panel beside it may have set another one
        axis.ticklabel_format(axis="y", useOffset=False)
    axis.margins(x=0.02)
    axis.xaxis.set_major_locator(
        MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10], integer=along == "round", min_n_ticks=1)
    )
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if percent:
        axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(100 * value, 6):g}%"))


def _spent(axis: Axes, along: str) -> str:
    """Numbers of a cost in the unit that suits them; the label of the axis."""
    unit, factor = unit_for(along, axis.dataLim.x1)
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{round(factor * value, 9):g}"))
    return COSTS[along].label.replace(COSTS[along].heading, unit)


def two_wide(number: int) -> list[list[int]]:
    """Panels in rows of two, for `Figure.subplot_mosaic`, so that they can be read on a narrow screen; the first of an
    odd number has a row of its own.

    >>> two_wide(1), two_wide(3), two_wide(4)
    ([[0]], [[0, 0], [1, 2]], [[0, 1], [2, 3]])
    """
    order = [0, *range(number)] if number > 1 and number % 2 else [*range(number)]
    return [order[at : at + 2] for at in range(0, len(order), 2)]


def caption(figure: Figure, notes: Sequence[str], entries: Mapping[str, Artist] | None = None) -> None:
    """Notes below all panels, in small letters, and below them a legend if there are entries. The figure grows for it.

    Args:
        entries: from a label, which may be long, to what it explains.
    """
    room = int(_CHARACTERS * figure.get_figwidth())
    text = textwrap.fill("; ".join(filter(None, notes)), room)
    labels = [textwrap.fill(label, room - 8) for label in entries or {}]
    if not text and not labels:
        return
    widest = max((max(map(len, label.split("\n"))) for label in labels), default=0)
    number = max(1, min(len(labels), room // (widest + 8)))
    rows = math.ceil(len(labels) / number)
    lines = sum(max(label.count("\n") + 1 for label in labels[at::rows]) for at in range(rows))
    lines += text.count("\n") + 1 if text else 0
    figure.set_figheight(figure.get_figheight() + 0.1 + 0.17 * lines)
    look = {"ncols": number, "frameon": False, "fontsize": 8, "alignment": "left", "borderpad": 0.2}
    legend = figure.legend(list((entries or {}).values()), labels, loc="outside lower left", **look)
    if text:
        legend.set_title(text, {"size": 8})
        legend.get_title().set_color("0.3")


def shorten(text: str) -> str:
    """A text without the folders that absolute paths in it lie in, but for the last one.

    >>> shorten("/home/me/runs/pair/fedmr-seed0 (cnn)"), shorten("text:/data/emma.txt, runs/a")
    ('pair/fedmr-seed0 (cnn)', 'text:data/emma.txt, runs/a')
    """
    return re.sub(r"(?<![^\s:=,(])(?:/[^\s:=,()/]+)+", lambda found: "/".join(found[0].split("/")[1:][-2:]), text)


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically. Raises FLError as `check_file` does."""
    kind = check_file(path)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format=kind)


def check_new(path: Path, flag: str = "--out") -> None:
    """Raise FLError if there is anything where a figure is to be written (a file, a folder, a device, a link that leads
    nowhere), and as `check_file` does.
    """
    if path.name and os.path.lexists(path):
        raise FLError(f"{path} exists already: choose another {flag}")
    check_file(path)


def check_file(path: Path) -> str:
    """The kind of file that a figure becomes. Raises FLError if matplotlib cannot write it, or there is no folder.

    >>> check_file(Path("a.PDF"))
    'pdf'
    """
    if not path.name:
        raise FLError(f"{path} is no file that a figure can be written to: give a name, such as figure.png")
    kind = path.suffix.lstrip(".").lower() or "png"
    if kind not in FigureCanvasBase.get_supported_filetypes():
        raise FLError(f"{path}: figures are not written as {kind!r}; choose .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise FLError(f"{path} cannot be written: there is no folder {path.parent}")
    return kind
