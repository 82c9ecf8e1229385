"""What all figures share: the axes of curves, legends, and how a figure is written."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, ScalarFormatter

from fl.analysis.costs import COSTS
from fl.base.errors import FLError
from fl.base.files import replacing
from fl.runs.columns import columns

_ALONG = {"round": "round"} | {name: cost.label for name, cost in COSTS.items()}
"""The columns that curves can be drawn against, and the labels of that axis."""


def finish(axis: Axes, key: str, along: str = "round") -> None:
    """The axes of the curves of a column."""
    column = columns()[key]
    dress(axis, column.label, percent=column.factor == 100, legend=False, along=along)
    if column.log:
        axis.set_yscale("log")


def legend_below(figure: Figure, width: int, marked: Sequence[str] = ()) -> None:
    """One legend for all panels, since labels name every setting that differs and may be long. The figure grows for it.

    Args:
        width: characters of a line.
        marked: the methods whose levels `mark_levels` has marked; a grey line above the legend names them.
    """
    lines = {line.get_label(): line for axis in figure.axes for line in axis.lines}  # a panel may lack some
    lines = {label: line for label, line in lines.items() if not label.startswith("_")}  # such as ends of error bars
    labels = [textwrap.fill(label, width) for label in lines]
    columns = max(1, min(len(labels), int(1.14 * width) // (max(map(len, labels)) + 2)))
    if sum(map(len, labels)) < 1.14 * width:
        columns = len(labels)
    rows = [labels[at :: math.ceil(len(labels) / columns)] for at in range(math.ceil(len(labels) / columns))]
    height = sum(max(label.count("\n") + 1 for label in row) for row in rows)
    figure.set_figheight(figure.get_figheight() + 0.18 * (height + bool(marked)))
    look = {"ncols": columns, "frameon": False, "fontsize": 8, "alignment": "left"}
    legend = figure.legend(list(lines.values()), labels, loc="outside lower left", **look)
    if marked:
        legend.set_title(f"vertical lines: the next level of {', '.join(dict.fromkeys(marked))}", {"size": 7})
        legend.get_title().set_color("0.45")


def dress(axis: Axes, label: str, percent: bool = False, legend: bool = True, along: str = "round") -> None:
    """Labels, ticks and markers of an axis with curves, whose values may be shares in percent."""
    for line in axis.lines:
        if len(line.get_xdata()) <= 12:  # few points, or a single one, which a line alone would not show
            line.set_marker("o")
            line.set_markersize(3.5)
    axis.set_xlabel(_ALONG[along])
    axis.set_ylabel(label)
    if isinstance(axis.yaxis.get_major_formatter(), ScalarFormatter):  # a panel beside it may have set another one
        axis.ticklabel_format(axis="y", useOffset=False)
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=along == "round", min_n_ticks=1))
    if along == "tmac":  # 1e-4 once, and not in every number
        axis.ticklabel_format(axis="x", scilimits=(-2, 6))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)
    if percent:
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    if legend and axis.lines:
        axis.legend(frameon=False, fontsize=8)


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically. Raises FLError as `check_file` does."""
    kind = check_file(path)
    for axis in figure.axes:
        if isinstance(axis.yaxis.get_major_formatter(), PercentFormatter):  # a deviation may reach beyond 0 and 100%
            low, high = axis.get_ylim()
            axis.set_ylim(max(low, -0.02), min(high, 1.02))
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format=kind)


def check_new(path: Path) -> None:
    """Raise FLError if a figure's file exists already, and as `check_file` does."""
    if path.exists():
        raise FLError(f"{path} exists already: choose another --out")
    check_file(path)


def check_file(path: Path) -> str:
    """The kind of file that a figure becomes. Raises FLError if matplotlib cannot write it, or there is no folder.

    >>> check_file(Path("a.PDF"))
    'pdf'
    """
    kind = path.suffix.lstrip(".").lower() or "png"
    if kind not in FigureCanvasBase.get_supported_filetypes():
        raise FLError(f"{path}: figures are not written as {kind!r}; choose .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise FLError(f"{path} cannot be written: there is no folder {path.parent}")
    return kind
