"""Pictures of runs."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, ScalarFormatter

from fl.errors import FLError
from fl.files import replacing
from fl.metrics import Row, selected

_LABELS = {
    "accuracy": "test accuracy",
    "local_test_accuracy": "mean test accuracy\non clients' own data",
    "loss": "test loss",
    "perplexity": "test perplexity",
    "attack_success": "images with the trigger\ntaken for its class",
    "models_cosine": "mean pairwise cosine of the models",
}
_ALONG = {
    "round": "round",
    "megabytes": "MB sent and received by a client (mean)",
    "tmac": "TMAC of all clients, forward passes only",
    "elapsed": "seconds",
}
"""What curves may be drawn against: columns of the rows, and how the axis is called."""


def series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """(rounds, values) where the metric was measured.

    >>> series([{"round": 1}, {"round": 2, "loss": 0.5}], "loss")
    ([2], [0.5])
    """
    pairs = [(int(row["round"]), row[key]) for row in rows if key in row]
    return [r for r, _ in pairs], [v for _, v in pairs]


def new_levels(rows: Sequence[Row]) -> list[Row]:
    """The rows in which another level begins to train; the first level is no other.

    >>> new_levels([{"round": 1, "level": 1}, {"round": 2, "level": 2}, {"round": 3, "level": 2}])
    [{'round': 2, 'level': 2}]
    """
    having = [row for row in rows if "level" in row]
    return [row for before, row in pairwise(having) if row["level"] != before["level"]]


def mark_levels(axis: Axes, rows: Sequence[Row], color: str, along: str = "round", named: bool = False) -> None:
    """A thin vertical line where another level begins to train, with the level above it if `named`."""
    edge = axis.get_xaxis_transform()
    for row in new_levels(rows):
        axis.vlines(row[along], 0, 1, transform=edge, colors=color, lw=0.8, alpha=0.4, zorder=0)
        if named:
            level = f"level {row['level']}"
            axis.text(row[along], 1.01, level, transform=edge, rotation=90, ha="center", va="bottom", fontsize=7)


def run_figure(rows: Sequence[Row], title: str, path: Path) -> None:
    """The curves of one run: accuracy (global model, and the K models with their spread), losses, similarity."""
    with_cosine = any("models_cosine" in row for row in rows)
    figure = Figure(figsize=(13 if with_cosine else 9, 3.8), layout="constrained")
    axes = figure.subplots(1, 3 if with_cosine else 2)

    axes[0].plot(*series(rows, "accuracy"), color="C0", label="global model")
    r, mean = series(rows, "models_accuracy")
    if r:
        spread = np.array(series(rows, "models_std")[1])
        axes[0].plot(r, mean, color="C1", lw=1.2, label="models of the participants (mean ± std)")
        axes[0].fill_between(r, np.array(mean) - spread, np.array(mean) + spread, color="C1", alpha=0.2, lw=0)
    for part, color in (("valid", "C4"), ("test", "C2")):
        r, mean = series(rows, f"local_{part}_accuracy")
        if r:
            axes[0].plot(r, mean, color=color, lw=1.2, label=f"clients' own {part} data (mean)")
    _finish(axes[0], "accuracy", percent=True)

    axes[1].plot(*series(rows, "loss"), color="C0", label="test, global model")
    axes[1].plot(*series(rows, "train_loss"), color="C3", lw=1.2, label="training, mean over participants")
    text = any("perplexity" in row for row in rows)
    _finish(axes[1], "cross entropy of a token" if text else "cross entropy")
    if with_cosine:
        axes[2].plot(*series(rows, "models_cosine"), color="C0")
        _finish(axes[2], _LABELS["models_cosine"], legend=False)
    for axis in axes:
        mark_levels(axis, rows, "C0", named=True)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def comparison_figure(
    groups: Mapping[str, Sequence[Sequence[Row]]], title: str, path: Path, along: str = "round"
) -> None:
    """Curves of several methods, mean and one standard deviation over their runs.

    What clients score on their own test data is drawn where all runs have it. A vertical line is where the first run of
    a method begins to train another level, and the legend says so.

    Args:
        groups: label, whose first word is the method -> the rows of each of its runs (one run a seed).
        along: the column that curves are drawn against. Where it stays 0, as what is sent by a method that sends
            nothing, the method is a dashed horizontal line at the round that `fl.metrics.selected` gives.
    """
    known = [set().union(*rows) for runs in groups.values() for rows in runs]
    keys = [key for key in _LABELS if any(key in columns for columns in known)]
    for key, left_out in (
        ("loss", all("perplexity" in columns for columns in known)),  # which says the same
        ("local_test_accuracy", not all("local_test_accuracy" in columns for columns in known)),
    ):
        if left_out and key in keys:
            keys.remove(key)
    wide = len(keys) if len(keys) < 4 else math.ceil(len(keys) / 2)
    high = math.ceil(len(keys) / wide)
    figure = Figure(figsize=(4.6 * wide, 3.8 * high), layout="constrained")
    axes = np.atleast_1d(figure.subplots(high, wide)).flatten()
    for axis, key in zip(axes, keys):
        still = {}
        for color, (label, runs) in enumerate(groups.items()):
            if runs[0][-1][along]:
                curve(axis, runs, key, label, f"C{color}", along=along)
                mark_levels(axis, runs[0], f"C{color}", along)
            else:
                still[label] = f"C{color}"
        finish(axis, key, along)
        for label, color in still.items():
            _constant(axis, groups[label], key, label, color)
    for axis in axes[len(keys) :]:
        axis.set_visible(False)
    marked = [label.split()[0] for label, runs in groups.items() if runs[0][-1][along] and new_levels(runs[0])]
    legend_below(figure, 22 * wide, marked)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def curve(
    axis: Axes, runs: Sequence[Sequence[Row]], key: str, label: str, color: str, style: str = "-", along: str = "round"
) -> None:
    """Mean and one standard deviation of a metric over runs, round by round. The end has a dot where it lies straight
    above or below what comes before, as at the end of a method whose last rounds send nothing.
    """
    at, mean, std = mean_and_std(runs, key, along)
    axis.plot(at, mean, style, color=color, label=label)
    axis.fill_between(at, mean - std, mean + std, color=color, alpha=0.2, lw=0)
    if len(at) > 1 and at[-1] == at[-2]:
        axis.scatter(at[-1], mean[-1], s=16, color=color, zorder=3)


def _constant(axis: Axes, runs: Sequence[Sequence[Row]], key: str, label: str, color: str) -> None:
    """The mean and one standard deviation over runs of a metric in their selected rounds, all along the axis."""
    values = [row[key] for row in map(selected, runs) if key in row]
    if values:
        mean, std = np.mean(values), np.std(values, ddof=1) if len(values) > 1 else 0.0
        axis.axhline(mean, ls="--", color=color, lw=1.2, label=label)
        axis.axhspan(mean - std, mean + std, color=color, alpha=0.15, lw=0)


def finish(axis: Axes, key: str, along: str = "round") -> None:
    """The axes of a metric's curves."""
    _finish(axis, _LABELS[key], percent=key == "attack_success" or key.endswith("accuracy"), legend=False, along=along)
    if key == "perplexity":
        axis.set_yscale("log")


def legend_below(figure: Figure, width: int, marked: Sequence[str] = ()) -> None:
    """One legend for all panels, since labels name every setting that differs and may be long; the figure grows by it.

    Args:
        width: characters of a line.
        marked: methods of which `mark_levels` marked levels, which a grey line in the legend tells.
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


def mean_and_std(
    runs: Sequence[Sequence[Row]], key: str, along: str = "round"
) -> tuple[list[float], np.ndarray, np.ndarray]:
    """(places, mean, sample standard deviation) over the runs, at the rounds that all of them measured. The places are
    the means of column `along` in these rounds.

    >>> mean_and_std([[{"round": 1, "loss": 1.0}], [{"round": 1, "loss": 3.0}]], "loss")[:2]
    ([1.0], array([2.]))
    """
    columns = [{row["round"]: (row[along], row[key]) for row in rows if key in row} for rows in runs]
    shared = sorted(set.intersection(*(set(column) for column in columns)))
    pairs = np.array([[column[r] for r in shared] for column in columns]).reshape(len(runs), -1, 2)
    places, values = pairs[..., 0].mean(0), pairs[..., 1]
    std = values.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(shared))
    return places.tolist(), values.mean(0), std


def _finish(axis: Axes, label: str, percent: bool = False, legend: bool = True, along: str = "round") -> None:
    for line in axis.lines:
        if len(line.get_xdata()) <= 12:  # few points, or a single one, which a line alone would not show
            line.set_marker("o")
            line.set_markersize(3.5)
    axis.set_xlabel(_ALONG[along])
    axis.set_ylabel(label)
    if isinstance(axis.yaxis.get_major_formatter(), ScalarFormatter):  # no other, that a panel beside it may have set
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
    """Write a figure atomically; FLError as `check_file`."""
    kind = check_file(path)
    for axis in figure.axes:
        if isinstance(axis.yaxis.get_major_formatter(), PercentFormatter):  # a deviation may reach beyond 0 and 100%
            low, high = axis.get_ylim()
            axis.set_ylim(max(low, -0.02), min(high, 1.02))
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format=kind)


def check_file(path: Path) -> str:
    """The kind of file that a figure's path asks for; FLError if matplotlib does not write it, or the folder lacks.

    >>> check_file(Path("a.PDF"))
    'pdf'
    """
    kind = path.suffix.lstrip(".").lower() or "png"
    if kind not in FigureCanvasBase.get_supported_filetypes():
        raise FLError(f"{path}: figures are not written as {kind!r}; take .png, .pdf or .svg")
    if not path.parent.is_dir():
        raise FLError(f"{path} cannot be written: there is no folder {path.parent}")
    return kind
