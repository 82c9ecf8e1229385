"""Shared parts of figures: colours, axes of curves, legends, writing of files."""

import math
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, NullLocator, ScalarFormatter

from fl.analysis.costs import COSTS, unit_for
from fl.base.columns import Column
from fl.base.errors import FLError
from fl.base.files import replacing
from fl.runs.columns import columns

COLORS = ("#0072b2", "#d55e00", "#009e73", "#000000", "#cc79a7", "#e69f00", "#56b4e9", "#870f2d")
"""Colours of the lines in one panel, most of them of Okabe and Ito: colour-blind people tell them apart."""
_CHARACTERS = 15.5  # of a caption in an inch
_EDGE = 0.02  # share of the axis beyond the least and largest possible value, so that lines there are seen
_RELATIVE = 0.01  # an axis spans at least this share of its values
_FEW = 30  # a logarithmic axis whose ends differ by a smaller factor has ticks between powers of ten


def finish(axis: Axes, key: str, along: str = "round") -> None:
    """Finish the axes of a column's curves, once all curves are drawn."""
    column = columns([key])[key]
    dress(axis, column.label, percent=column.factor == 100, along=along)
    _settle(axis, column)


def dress(axis: Axes, label: str, percent: bool = False, along: str = "round") -> None:
    """Set labels, ticks and markers of an axis with curves, in percent for shares."""
    for line in axis.lines:
        alone = line.get_transform() == axis.transData and line.get_marker() == "None"
        if alone and len(line.get_xdata()) <= 12:  # few points, or a single one, which a line alone would not show
            line.set_marker("o")
            line.set_markersize(3.5)
    axis.set(xlabel=along, ylabel=label)
    if along in COSTS:
        unit, factor = unit_for(along, axis.dataLim.x1)
        axis.xaxis.set_major_formatter(lambda value, _: f"{round(factor * value, 9):g}")
        axis.set_xlabel(COSTS[along].label.replace(COSTS[along].heading, unit))
    if percent:
        axis.yaxis.set_major_formatter(lambda value, _: f"{round(100 * value, 6):g}%")
    elif isinstance(axis.yaxis.get_major_formatter(), ScalarFormatter):  # a panel beside it may have set another one
        axis.ticklabel_format(axis="y", useOffset=False)
    axis.margins(x=0.02)
    whole = along == "round"
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10], integer=whole, min_n_ticks=1))
    axis.grid(alpha=0.25)
    axis.spines[["top", "right"]].set_visible(False)


def _settle(axis: Axes, column: Column) -> None:
    """Set the ends of the y axis once all curves are drawn: at least `column.span` apart, and not far beyond the
    values that the column can have. An axis without a finite value says so.
    """
    if column.log:
        axis.set_yscale("log")
    if not any(np.isfinite(line.get_ydata()).any() for line in axis.lines):
        axis.text(0.5, 0.5, "no finite value", transform=axis.transAxes, ha="center", color="0.4")
        axis.tick_params(axis="y", which="both", left=False, labelleft=False)
        return
    scale = axis.yaxis.get_transform()
    low, high = scale.transform(axis.get_ylim())
    span = math.log10(1 + column.span) if column.log else max(column.span, _RELATIVE * max(abs(low), abs(high)))
    low, high = scale.inverted().transform(within(low, high, span, *scale.transform(column.ends)))
    axis.set_ylim(low, high)
    if column.log:  # plain numbers, some of them between the powers of ten if the axis spans few
        if high / low < _FEW:  # an axis that hardly spans a factor of two is as good as linear
            axis.yaxis.set_major_locator(MaxNLocator(nbins=5) if high / low < 2 else LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter(NullFormatter())


def within(low: float, high: float, span: float, bottom: float, top: float) -> tuple[float, float]:
    """Widen an axis until it spans `span`, hardly beyond `bottom` and `top`.

    >>> [round(end, 3) for end in within(-0.4, 0.5, 0.02, 0, 1)]
    [-0.018, 0.5]
    """
    edge = _EDGE * max(span, high - low)
    bottom, top = bottom - edge, top + edge
    low, high = max(low, bottom), min(high, top)
    missing = max(0.0, span - (high - low))
    low, high = low - missing / 2, high + missing / 2
    shift = max(0.0, bottom - low) - max(0.0, high - top)
    return low + shift, high + shift


def caption(figure: Figure, notes: Sequence[str], entries: Mapping[str, Artist] | None = None) -> None:
    """Write notes in small letters below all panels, and below them a legend, if any.

    The figure grows for it.

    Args:
        entries: from a label, which may be long, to the line that it explains.
    """
    room = int(_CHARACTERS * figure.get_figwidth())
    text = textwrap.fill("; ".join(filter(None, notes)), room)
    labels, look = _legend(entries or {}, room)
    if not text and not labels:
        return
    look |= {"title": text, "title_fontsize": 8, "alignment": "left", "borderpad": 0.2}
    legend = figure.legend(list((entries or {}).values()), labels, loc="outside lower left", **look)
    legend.get_title().set_color("0.3")
    figure.set_figheight(figure.get_figheight() + 0.1 + legend.get_window_extent().height / figure.dpi)


def name_lines(axis: Axes, entries: Mapping[str, Artist], width: float) -> float:
    """Put the legend of a panel right above it; return its height in inches.

    Args:
        entries: from a label, which may be long, to the line that it explains.
    """
    labels, look = _legend(entries, int(_CHARACTERS * width))
    place = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2, "alignment": "left"}
    legend = axis.legend(list(entries.values()), labels, handlelength=2.8, **place, **look)
    return legend.get_window_extent().height / axis.figure.dpi


def _legend(entries: Mapping[str, Artist], room: int) -> tuple[list[str], dict[str, Any]]:
    """Break labels to fit into a number of characters; return the legend's look, too."""
    labels = [textwrap.fill(shorten(label), room - 8) for label in entries]
    widest = max((len(line) for label in labels for line in label.split("\n")), default=room)
    return labels, {"ncols": max(1, min(len(labels), room // (widest + 8))), "frameon": False, "fontsize": 8}


def shorten(text: str) -> str:
    """Cut absolute paths in a text down to the file and its folder.

    >>> shorten("/home/me/runs/pair/fedmr-seed0 (cnn), text:/data/emma.txt, runs/a")
    'pair/fedmr-seed0 (cnn), text:data/emma.txt, runs/a'
    """
    return re.sub(r"(?<![^\s:=,(])(?:/[^\s:=,()/]+)+", lambda match: "/".join(match[0].split("/")[1:][-2:]), text)


def save(figure: Figure, path: Path) -> None:
    """Write a figure atomically. Raises FLError as `check_file` does."""
    kind = check_file(path)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format=kind)


def check_new(path: Path, flag: str = "--out") -> None:
    """Raise FLError if a figure's file is there already, and as `check_file` does.

    It may be a file, a folder, a device, or a link that leads nowhere.
    """
    if path.name and os.path.lexists(path):
        raise FLError(f"{path} exists already: choose another {flag}", code="file")
    check_file(path)


def check_file(path: Path) -> str:
    """Return the format of a figure's file.

    Raises FLError if matplotlib cannot write it, or there is no folder.
    """
    if not path.name:
        raise FLError(f"{path} is no file that a figure can be written to: give a name, such as figure.png")
    kind = path.suffix.lstrip(".").lower()
    if not kind:
        raise FLError(f"{path} does not say what the figure is written as: {path}.png, .pdf or .svg")
    if kind not in FigureCanvasBase.get_supported_filetypes():
        raise FLError(f"{path}: figures are not written as {kind!r}; choose .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise FLError(f"{path} cannot be written: there is no folder {path.parent}", code="file")
    return kind
