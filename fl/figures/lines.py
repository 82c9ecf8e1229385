"""Panels of lines that can be told apart: few in colour, each with its name at its end, the others grey behind them."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fl.figures.curves import curve, mark_levels, mean_and_std, new_levels
from fl.figures.ends import Named, label_ends
from fl.figures.style import COLORS, GREY, caption, finish, shorten
from fl.runs.columns import columns
from fl.runs.metrics import Row, selected

MOST = 5
"""Lines in colour in one panel."""
MUTED = {"color": "0.8", "lw": 0.9, "zorder": 1}
"""How the other lines look."""
_LONG = 20  # characters of a name that fits beside an axis
_STYLES = ("--", ":", "-.")  # of references
_PLOT = 0.6  # least share of a panel's height that its axes have


class Line(NamedTuple):
    """The runs of one line, one a seed, and their method. A reference is grey and broken, and stands in every panel."""

    label: str
    runs: Sequence[Sequence[Row]]
    method: str = ""
    reference: bool = False


class Style(NamedTuple):
    """How a line looks in all panels, and its name there."""

    color: str
    dash: str
    name: str


def parts(lines: Sequence[Line]) -> list[list[Line]]:
    """Lines in groups of at most `MOST`, as equal as can be, each with all references.

    >>> [len(part) for part in parts([Line(name, []) for name in "abcdefghijk"])]
    [4, 4, 3]
    """
    own, references = ([line for line in lines if line.reference is kind] for kind in (False, True))
    number = math.ceil(len(own) / MOST) or 1
    size, more = divmod(len(own), number)
    starts = [at * size + min(at, more) for at in range(number + 1)]
    return [own[a:b] + references for a, b in pairwise(starts)]


def styles(groups: Sequence[Sequence[Line]]) -> dict[str, Style]:
    """The look of every line by its label: colours begin anew in every group. If a label is too long to stand beside an
    axis, all names are letters, which `name_lines` explains.
    """
    every = sorted((line for group in groups for line in group), key=lambda line: line.reference)
    labels = list(dict.fromkeys(line.label for line in every))
    long = any(len(shorten(label)) > _LONG for label in labels)
    names = {label: _letter(at) if long else shorten(label) for at, label in enumerate(labels)}
    found: dict[str, Style] = {}
    for group in groups:
        own, references = ([line for line in group if line.reference is kind] for kind in (False, True))
        looks = [(COLORS[at], "-") for at in range(len(own))]
        looks += [(GREY, _STYLES[at % len(_STYLES)]) for at in range(len(references))]
        found |= {line.label: Style(*look, names[line.label]) for line, look in zip(own + references, looks)}
    return found


def draw_lines(
    axis: Axes,
    key: str,
    lines: Sequence[Line],
    looks: dict[str, Style],
    behind: Sequence[Line] = (),
    along: str = "round",
) -> None:
    """The curves of a column in one panel: mean and one standard deviation over seeds, see `curve`. What is spent by a
    method that spends nothing stays 0; it is a dashed horizontal line with the value of its selected round.

    Args:
        behind: other lines, drawn in light grey without bands.
    """
    column = columns()[key]
    for line in behind:
        if line.runs[0][-1][along]:
            at, mean, _ = mean_and_std(line.runs, key, along)
            axis.plot(at, mean, label=f"_{line.label}", **MUTED)
    still = []
    for line in lines:
        look = looks[line.label]
        if line.runs[0][-1][along]:
            curve(axis, line.runs, key, line.label, look.color, look.dash, along)
            mark_levels(axis, line.runs[0], look.color, along)
        else:
            still.append(line)
    for line in still:
        values = [row[key] for row in map(selected, line.runs) if key in row]
        if values:
            mean, std = np.mean(values), np.std(values, ddof=1) if len(values) > 1 else 0.0
            color = looks[line.label].color
            axis.axhline(mean, ls="--", color=color, lw=1.2, label=line.label)
            axis.axhspan(*np.clip([mean - std, mean + std], *column.ends), color=color, alpha=0.15, lw=0)
    finish(axis, key, along)


def name_ends(panels: Sequence[Axes], looks: dict[str, Style], height: float) -> None:
    """Give panels of one column the same y axis, once all of them are drawn, and their lines names at the ends.

    Args:
        height: of a panel in inches, with what stands around its axes.
    """
    ends = [panel.get_ylim() for panel in panels]
    for panel in panels:
        panel.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
        shown = [line for line in panel.lines if line.get_label() in looks]
        label_ends(panel, [Named(looks[line.get_label()].name, line) for line in shown], _PLOT * height)


def name_lines(
    figure: Figure,
    lines: Sequence[Line],
    looks: dict[str, Style],
    along: str = "round",
    notes: Sequence[str] = (),
) -> None:
    """Say below the panels what lines, bands and vertical lines mean, and what names stand for if they are letters.

    Args:
        notes: what else to say.
    """
    notes = [seeds_note([len(line.runs) for line in lines]), *notes]
    still = [line for line in lines if line.runs[0][-1][along] == 0]
    if still:
        notes.append("dashed line from edge to edge: a method that spends nothing")
    marked = dict.fromkeys(line.method for line in lines if line not in still and new_levels(line.runs[0]))
    if marked:
        notes.append(f"vertical lines: the next level of {', '.join(marked)}")
    name_styles(figure, lines, looks, notes)


def name_styles(figure: Figure, lines: Sequence[Line], looks: dict[str, Style], notes: Sequence[str]) -> None:
    """Notes below the panels, and what names stand for if they are letters."""
    if len({line.label for line in lines if not line.reference}) > MOST:
        notes = [*notes, "light grey: the lines of the other panels"]
    entries = {}
    for label, look in sorted(looks.items(), key=lambda item: (len(item[1].name), item[1].name)):
        if look.name != shorten(label):
            entries[f"{look.name}  {shorten(label)}"] = Line2D([], [], color=look.color, ls=look.dash)
    caption(figure, notes, entries)


def seeds_note(numbers: Sequence[int], band: str = "band") -> str:
    """What lines and bands are, where runs with several seeds are one line.

    >>> seeds_note([3, 3]), seeds_note([1, 1])
    ('line: mean, band: ± one standard deviation over 3 seeds', '')
    >>> seeds_note([2, 1])
    'line: mean, band: ± one standard deviation over 1 to 2 seeds (no band: one seed)'
    """
    if max(numbers) == 1:
        return ""
    few = f"{min(numbers)} to " if min(numbers) < max(numbers) else ""
    alone = f" (no {band}: one seed)" if min(numbers) == 1 else ""
    return f"line: mean, {band}: ± one standard deviation over {few}{max(numbers)} seeds{alone}"


def _letter(number: int) -> str:
    """A, B, ... Z, A1, B1, ...

    >>> _letter(1), _letter(27)
    ('B', 'B1')
    """
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[number % 26] + (str(number // 26) if number > 25 else "")
