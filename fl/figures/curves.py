"""Figures of curves: one run, and runs side by side."""

import math
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from fl.analysis.groups import mean_and_spread
from fl.base.columns import Due
from fl.engine.losses import cross_entropy
from fl.figures.style import COLORS, caption, finish, name_lines, save, shorten
from fl.runs.columns import columns, first_score
from fl.runs.metrics import Row, find_judged
from fl.runs.state import RunState

MOST = 5
"""Lines in colour in one panel; more are shared out among panels."""
MUTED = {"color": "0.8", "lw": 0.9, "zorder": 1}
_DASHES = ("-", "--", ":", "-.")
_HIGH = 3.1  # inches of a panel
_BESIDE = 0.7  # inches beside a panel, for its numbers

LineStyle = Mapping[str, Any]
"""How a line is drawn: its `color`, its dash (`ls`) and its width (`lw`)."""


class Curve(NamedTuple):
    """The runs of one line, one a seed, and the rounds that they are judged by.

    By default they are the rounds that `find_judged` returns.
    """

    label: str
    runs: Sequence[Sequence[Row]]
    method: str
    chosen: Sequence[Row] = ()


class Panel(NamedTuple):
    """Lines of one column in colour, and the others in light grey behind them."""

    key: str
    lines: Sequence[Curve]
    behind: Sequence[Curve] = ()


def new_levels(rows: Sequence[Row]) -> list[Row]:
    """Find the rows in which another level begins to train, without the first level."""
    having = [row for row in rows if "level" in row]
    return [row for before, row in pairwise(having) if row["level"] != before["level"]]


def mark_levels(axis: Axes, rows: Sequence[Row], color: str, along: str = "round", named: bool = False) -> None:
    """Draw a thin vertical line where another level begins to train.

    If `named`, the level stands above it.
    """
    edge = axis.get_xaxis_transform()
    for row in new_levels(rows):
        axis.vlines(row[along], 0, 1, transform=edge, colors=color, lw=0.8, alpha=0.4, zorder=0)
        if named:
            level = f"level {row['level']}"
            axis.text(row[along], 1.01, level, transform=edge, rotation=90, ha="center", va="bottom", fontsize=7)


def mean_and_std(
    runs: Sequence[Sequence[Row]], key: str, along: str = "round"
) -> tuple[list[float], np.ndarray, np.ndarray]:
    """Average a column over runs, in the rounds that all runs measured.

    Returns (places, mean, sample standard deviation). The places are the means of the column `along` in these rounds.
    """
    measured = [{row["round"]: (row[along], row[key]) for row in rows if key in row} for rows in runs]
    shared = sorted(set.intersection(*(set(by_round) for by_round in measured)))
    pairs = np.array([[by_round[r] for r in shared] for by_round in measured]).reshape(len(runs), -1, 2)
    places, values = pairs[..., 0].mean(0), pairs[..., 1]
    with np.errstate(invalid="ignore"):  # of infinite losses
        std = values.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(shared))
    return places.tolist(), values.mean(0), std


def curve(
    axis: Axes, runs: Sequence[Sequence[Row]], key: str, label: str, look: LineStyle, along: str = "round"
) -> None:
    """Draw mean and one standard deviation of a column over runs.

    The end of the curve has a dot if it lies straight above or below the point before it, as for a method whose last
    rounds send nothing.
    """
    at, mean, std = mean_and_std(runs, key, along)
    axis.plot(at, mean, label=label, **look)
    _band(axis, at, mean, std, look["color"], columns([key])[key].ends)
    if len(at) > 1 and at[-1] == at[-2]:
        axis.scatter(at[-1], mean[-1], s=16, color=look["color"], zorder=3)


def _band(
    axis: Axes, at: Sequence[float], mean: np.ndarray, std: np.ndarray, color: str, ends: tuple[float, float]
) -> None:
    """Draw a band of one standard deviation around a mean, within the ends of values."""
    if std.any():
        axis.fill_between(at, np.clip(mean - std, *ends), np.clip(mean + std, *ends), color=color, alpha=0.2, lw=0)


def _still(line: Curve, along: str) -> bool:
    """Return whether a method spends nothing of what `along` counts: no places for it."""
    return bool(line.runs) and not line.runs[0][-1][along]


def _looks_of(lines: Sequence[Curve], along: str) -> dict[str, LineStyle]:
    """Give every label its colour and dash.

    The first lines of a panel are the widest, so that others do not hide them. Lines in one panel differ in both, but
    the fifth, which has the dash of the first.
    """
    looks: dict[str, LineStyle] = {}
    for part in parts(lines):
        for at, line in enumerate(part):
            number = len(looks)
            color, turn = COLORS[number % len(COLORS)], number // len(COLORS)
            looks[line.label] = {"color": color, "ls": _DASHES[(at + turn) % 4], "lw": 2.2 - 0.2 * at}
    return looks | {line.label: {**looks[line.label], "ls": "--"} for line in lines if _still(line, along)}


def parts(lines: Sequence[Curve]) -> list[list[Curve]]:
    """Split lines into groups of at most `MOST`, as equal as can be."""
    named = list({line.label: line for line in lines}.values())
    split = np.array_split(np.arange(len(named)), math.ceil(len(named) / MOST) or 1)
    return [[named[at] for at in part] for part in split]


def _draw(axis: Axes, panel: Panel, looks: Mapping[str, LineStyle], along: str) -> None:
    """Draw the curves of a panel.

    A method that spends nothing is a horizontal line with the value of its selected round.
    """
    for line in panel.behind:
        if not _still(line, along):
            axis.plot(*mean_and_std(line.runs, panel.key, along)[:2], **MUTED)
    for line in panel.lines:
        look = looks[line.label]
        if not _still(line, along):
            curve(axis, line.runs, panel.key, line.label, look, along)
            mark_levels(axis, line.runs[0], look["color"], along)
        elif values := [row[panel.key] for row in line.chosen or map(find_judged, line.runs) if panel.key in row]:
            _draw_level(axis, line.label, look, *mean_and_spread(values), columns([panel.key])[panel.key].ends)


def _draw_level(axis: Axes, label: str, look: LineStyle, mean: float, std: float, ends: tuple[float, float]) -> None:
    """Draw a line from edge to edge with a band of one standard deviation."""
    axis.axhline(mean, label=label, **look)
    axis.axhspan(*np.clip([mean - std, mean + std], *ends), color=look["color"], alpha=0.15, lw=0)


def _finish_panel(axis: Axes, key: str, along: str) -> None:
    """Finish a panel once all panels that share its y axis are drawn; say below it which lines end without a value."""
    finish(axis, key, along)
    values = {line.get_label(): [*line.get_ydata()] for line in axis.lines if line.get_label()[0] != "_"}
    lost = [f"{shorten(name)} ({known[-1]})" for name, known in values.items() if known and not np.isfinite(known[-1])]
    without = [shorten(name) for name, known in values.items() if not known]
    notes = (("not finite at the end", lost), ("not measured", without))
    note = "\n".join(textwrap.fill(f"{reason}: {', '.join(names)}", 50) for reason, names in notes if names)
    axis.set_xlabel("\n".join(filter(None, [axis.get_xlabel(), note])))
    if axis.get_shared_y_axes().get_siblings(axis)[1:] and not axis.get_subplotspec().is_first_col():
        axis.set_ylabel("")


def _explain(figure: Figure, lines: Sequence[Curve], notes: Sequence[str], along: str) -> None:
    """Explain below the panels what bands, dashes, vertical and grey lines mean."""
    if any(_still(line, along) for line in lines):
        notes = [*notes, "dashed line from edge to edge: a method that spends nothing"]
    moving = [line for line in lines if line.runs and not _still(line, along)]
    if marked := dict.fromkeys(line.method for line in moving if new_levels(line.runs[0])):
        notes = [*notes, f"vertical lines: the next level of {', '.join(marked)}"]
    if len(parts(lines)) > 1:
        notes = [*notes, "light grey: the lines of the other panels"]
    caption(figure, notes)


def seeds_note(numbers: Sequence[int]) -> str:
    """Explain lines and bands where runs with several seeds are one line.

    >>> seeds_note([3, 3]), seeds_note([1, 1])
    ('line: mean, band: ± one standard deviation over 3 seeds', '')
    """
    if max(numbers) == 1:
        return ""
    few = f"{min(numbers)} to " if min(numbers) < max(numbers) else ""
    alone = " (no band: one seed)" if min(numbers) == 1 else ""
    return f"line: mean, band: ± one standard deviation over {few}{max(numbers)} seeds{alone}"


def new_figure(width: float, panels_high: int) -> Figure:
    """Make a figure with space for panels below each other."""
    figure = Figure(figsize=(width, _HIGH * panels_high), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    return figure


def two_wide(figure: Figure, number: int) -> list[Axes]:
    """Add panels in rows of two, so that they can be read on a narrow screen.

    The first of an odd number has a row of its own.
    """
    order = [0, *range(number)] if number > 1 and number % 2 else [*range(number)]
    rows = [order[at : at + 2] for at in range(0, len(order), 2)]
    return [axis for _, axis in sorted(figure.subplot_mosaic(rows).items())]


def run_figure(rows: Sequence[Row], title: str, path: Path, quantity: str = "cross entropy") -> None:
    """Draw the curves of one run.

    They are accuracy (global model, and the K models with their spread), loss and similarity.

    Args:
        quantity: what the loss is.
    """
    names = set().union(*rows)
    with_cosine = "models_cosine" in names
    figure = Figure(figsize=(7.6, 7.1 if with_cosine else 3.7), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    score = first_score(names)
    accuracy, loss, *cosine = axes = two_wide(figure, 3 if with_cosine else 2)

    def line(axis: Axes, key: str, number: int, label: str) -> None:
        if key in names:
            end = [row[key] for row in rows if key in row][-1]
            lost = "" if math.isfinite(end) else f", then {end}"
            look = {"color": COLORS[number], "ls": _DASHES[number], "lw": 1.2 if number else 1.5}
            curve(axis, [rows], key, label + lost, look)

    line(accuracy, score, 0, "global model")
    if "models_accuracy" in names:
        (at, mean, _), (_, std, _) = (mean_and_std([rows], f"models_{name}") for name in ("accuracy", "std"))
        _band(accuracy, at, mean, std, COLORS[1], (0, 1))
    line(accuracy, "models_accuracy", 1, "participants' models: mean,\nband: ± standard deviation")
    line(accuracy, f"local_valid_{score}", 2, "clients' own validation data (mean)")
    line(accuracy, f"local_test_{score}", 3, "clients' own test data (mean)")
    finish(accuracy, score)
    accuracy.set_ylabel("accuracy" if score == "accuracy" else "mean absolute error")
    line(loss, "loss", 0, "test, global model")
    line(loss, "train_loss", 1, "training, mean over participants")
    finish(loss, "loss")
    loss.set_ylabel(f"{quantity} of a token" if "perplexity" in names else quantity)
    for axis in cosine:
        line(axis, "models_cosine", 0, "")
        finish(axis, "models_cosine")
    for axis in axes:
        mark_levels(axis, rows, COLORS[0], named=True)
    for axis in (accuracy, loss):
        if axis.get_legend_handles_labels()[0]:  # before the first evaluation there may be none
            axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, fontsize=8)
    figure.suptitle(shorten(title), fontsize=11)
    save(figure, path)


def leave_curves(run: RunState) -> None:
    """Write curves.png into the run folder, once a round was done."""
    if run.rows:
        quantity = "cross entropy" if run.fed.local.loss is cross_entropy else "loss"
        run_figure(run.rows, run.config.title(), run.folder / "curves.png", quantity)


def comparison_figure(
    groups: Mapping[str, Sequence[Sequence[Row]]],
    title: str,
    path: Path,
    along: str = "round",
    chosen: Mapping[str, Sequence[Row]] | None = None,
) -> None:
    """Draw curves of several methods: mean and one standard deviation over their runs.

    More than `MOST` methods are shared out among panels; each shows the others in grey. Vertical lines mark the
    rounds in which the first run of a method begins to train another level.

    Args:
        groups: from a label, whose first word is the method, to the rows of each of its runs (one run a seed).
        along: the column that curves are drawn against. If it stays 0, such as the traffic of a method that sends
            nothing, the method is a dashed horizontal line with the value of its selected round, see
            `fl.runs.metrics.find_judged`.
        chosen: from a label to these rounds, where settings such as --best-by choose them.
    """
    lines, keys, shown = _panels_of(groups, chosen)
    together = parts(lines)
    if len(together) == 1:
        figure = new_figure(7.6 if len(keys) > 1 else 4.6, len(keys) // 2 + len(keys) % 2)
        axes = two_wide(figure, len(keys))
    else:
        figure = new_figure(3.8 * len(together), len(keys))
        axes = figure.subplots(len(keys), len(together), squeeze=False, sharey="row").flatten()
    _draw_panels(figure, axes, shown, lines, title, along)
    save(figure, path)


def _panels_of(
    groups: Mapping[str, Sequence[Sequence[Row]]], chosen: Mapping[str, Sequence[Row]] | None
) -> tuple[list[Curve], list[str], list[Panel]]:
    """Return the lines of methods, the drawn columns, and the panels by column."""
    lines = [
        Curve(label, runs, label.split()[0], chosen=(chosen or {}).get(label, ())) for label, runs in groups.items()
    ]
    keys = panels([set().union(*rows) for line in lines for rows in line.runs])
    shown = [Panel(key, part, [line for line in lines if line not in part]) for key in keys for part in parts(lines)]
    return lines, keys, shown


def single_panels(
    groups: Mapping[str, Sequence[Sequence[Row]]], along: str, chosen: Mapping[str, Sequence[Row]]
) -> Iterator[tuple[Panel, dict[str, LineStyle], Figure]]:
    """Draw each panel of `comparison_figure` as a figure without a legend.

    Yields the looks of its lines, too.
    """
    lines, _, shown = _panels_of(groups, chosen)
    looks = _looks_of(lines, along)
    for panel in shown:
        figure = Figure(figsize=(4.6, 3.1), layout="constrained")
        axis = figure.subplots()
        _draw(axis, panel, looks, along)
        _finish_panel(axis, panel.key, along)
        yield panel, looks, figure


def _draw_panels(
    figure: Figure, axes: Sequence[Axes], shown: Sequence[Panel], lines: Sequence[Curve], title: str, along: str
) -> None:
    """Draw panels into axes and explain them; finish all last, if they share y.

    The legend of a line is above the first panel that has it; where panels of several methods lie below each other,
    above each of them.
    """
    looks = _looks_of(lines, along)
    for axis, panel in zip(axes, shown):
        _draw(axis, panel, looks, along)
    for axis, panel in zip(axes, shown):
        _finish_panel(axis, panel.key, along)
    heights: dict[int, float] = {}
    for axis, panel in zip(axes, shown if len(parts(lines)) > 1 else shown[:1]):
        place = axis.get_subplotspec()
        wide = figure.get_figwidth() * len(place.colspan) / place.get_gridspec().ncols - _BESIDE
        entries = {line.label: Line2D([], [], **looks[line.label]) for line in panel.lines}
        row = place.rowspan.start
        heights[row] = max(heights.get(row, 0.0), name_lines(axis, entries, wide))
    figure.set_figheight(figure.get_figheight() + sum(heights.values()))
    figure.suptitle(shorten(title), fontsize=11)
    _explain(figure, lines, [seeds_note([len(line.runs) for line in lines])], along)


def panels(measured: Sequence[Collection[str]]) -> list[str]:
    """Choose the columns that have curves and that each run has.

    With a label, the global model's first. Scores on clients' own test data are drawn, beside the accuracy, if all runs
    have them.

    >>> panels([{"accuracy", "loss", "models_cosine", "local_test_accuracy"}])
    ['accuracy', 'local_test_accuracy', 'loss', 'models_cosine']
    """
    labelled = {name: column for name, column in columns(sorted(set().union(*measured))).items() if column.label}
    keys = [name for due in get_args(Due) for name, column in labelled.items() if column.due == due]
    keys = list(dict.fromkeys(["accuracy", local := "local_test_accuracy", *keys]))
    everywhere, somewhere = set.intersection(*map(set, measured)), set().union(*measured)
    left_out = {local} - everywhere
    if "perplexity" in everywhere:
        left_out.add("loss")  # the perplexity is its exponential
    return [key for key in keys if key in somewhere - left_out]
