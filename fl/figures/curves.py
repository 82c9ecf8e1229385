"""Curves of runs, round by round."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl.figures.style import COLORS, finish, save, shorten, two_wide
from fl.runs.columns import columns
from fl.runs.metrics import Row
from fl.runs.run import Run


def series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """(rounds, values) of the rounds that measured a column.

    >>> series([{"round": 1}, {"round": 2, "loss": 0.5}], "loss")
    ([2], [0.5])
    """
    pairs = [(int(row["round"]), row[key]) for row in rows if key in row]
    return [r for r, _ in pairs], [v for _, v in pairs]


def new_levels(rows: Sequence[Row]) -> list[Row]:
    """The rows in which another level begins to train; the first level does not count.

    >>> new_levels([{"round": 1, "level": 1}, {"round": 2, "level": 2}, {"round": 3, "level": 2}])
    [{'round': 2, 'level': 2}]
    """
    having = [row for row in rows if "level" in row]
    return [row for before, row in pairwise(having) if row["level"] != before["level"]]


def mark_levels(axis: Axes, rows: Sequence[Row], color: str, along: str = "round", named: bool = False) -> None:
    """A thin vertical line where another level begins to train; if `named`, the level stands above it."""
    edge = axis.get_xaxis_transform()
    for row in new_levels(rows):
        axis.vlines(row[along], 0, 1, transform=edge, colors=color, lw=0.8, alpha=0.4, zorder=0)
        if named:
            level = f"level {row['level']}"
            axis.text(row[along], 1.01, level, transform=edge, rotation=90, ha="center", va="bottom", fontsize=7)


def run_figure(rows: Sequence[Row], title: str, path: Path) -> None:
    """The curves of one run: accuracy (global model, and the K models with their spread), loss and similarity."""
    with_cosine = any("models_cosine" in row for row in rows)
    rows_of = two_wide(3 if with_cosine else 2)
    figure = Figure(figsize=(7.6, 0.3 + 3.4 * len(rows_of)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    axes = [axis for _, axis in sorted(figure.subplot_mosaic(rows_of).items())]
    accuracy, loss = axes[:2]

    _line(accuracy, rows, "accuracy", COLORS[0], "global model")
    if any("models_accuracy" in row for row in rows):
        r, mean = series(rows, "models_accuracy")
        _band(accuracy, r, mean, series(rows, "models_std")[1], COLORS[1], (0, 1))
        _line(accuracy, rows, "models_accuracy", COLORS[1], "participants' models: mean,\nband: ± standard deviation")
    for part, color in (("valid", COLORS[4]), ("test", COLORS[2])):
        if any(f"local_{part}_accuracy" in row for row in rows):
            _line(accuracy, rows, f"local_{part}_accuracy", color, f"clients' own {part} data (mean)")
    finish(accuracy, "accuracy")
    accuracy.set_ylabel("accuracy")

    _line(loss, rows, "loss", COLORS[0], "test, global model")
    _line(loss, rows, "train_loss", COLORS[1], "training, mean over participants")
    finish(loss, "loss")
    text = any("perplexity" in row for row in rows)
    loss.set_ylabel("cross entropy of a token" if text else "cross entropy")
    if with_cosine:
        _line(axes[2], rows, "models_cosine", COLORS[0], "")
        finish(axes[2], "models_cosine")
    for axis in axes:
        mark_levels(axis, rows, COLORS[0], named=True)
    for axis in (accuracy, loss):
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), frameon=False, fontsize=8)
    figure.suptitle(shorten(title), fontsize=11)
    save(figure, path)


def curve(
    axis: Axes, runs: Sequence[Sequence[Row]], key: str, label: str, color: str, style: str = "-", along: str = "round"
) -> None:
    """Mean and one standard deviation of a column over runs, round by round; the band ends where the column's values
    do, such as at 0 and 100 %. The end of the curve has a dot if it lies straight above or below the point before it,
    as for a method whose last rounds send nothing.
    """
    at, mean, std = mean_and_std(runs, key, along)
    axis.plot(at, mean, style, color=color, label=label)
    _band(axis, at, mean, std, color, columns()[key].ends)
    if len(at) > 1 and at[-1] == at[-2]:
        axis.scatter(at[-1], mean[-1], s=16, color=color, zorder=3)


def _line(axis: Axes, rows: Sequence[Row], key: str, color: str, label: str) -> None:
    """The curve of a run. Where it ends because values are not finite, its label says so."""
    rounds, values = series(rows, key)
    lost = f", then {values[-1]}" if values and not np.isfinite(values[-1]) else ""
    axis.plot(rounds, values, color=color, lw=1.5 if color == COLORS[0] else 1.2, label=label + lost)


def _band(
    axis: Axes, at: Sequence[float], mean: Sequence[float], std: Sequence[float], color: str, ends: tuple[float, float]
) -> None:
    """A band of one standard deviation around a mean, within the ends. Without a deviation there is none."""
    mean, std = np.asarray(mean), np.asarray(std)
    if std.any():
        axis.fill_between(at, np.clip(mean - std, *ends), np.clip(mean + std, *ends), color=color, alpha=0.2, lw=0)


def mean_and_std(
    runs: Sequence[Sequence[Row]], key: str, along: str = "round"
) -> tuple[list[float], np.ndarray, np.ndarray]:
    """(places, mean, sample standard deviation) over the runs, in the rounds that all of them measured. The places are
    the means of the column `along` in these rounds.

    >>> mean_and_std([[{"round": 1, "loss": 1.0}], [{"round": 1, "loss": 3.0}]], "loss")[:2]
    ([1.0], array([2.]))
    """
    measured = [{row["round"]: (row[along], row[key]) for row in rows if key in row} for rows in runs]
    shared = sorted(set.intersection(*(set(one) for one in measured)))
    pairs = np.array([[one[r] for r in shared] for one in measured]).reshape(len(runs), -1, 2)
    places, values = pairs[..., 0].mean(0), pairs[..., 1]
    with np.errstate(invalid="ignore"):  # of infinite losses
        std = values.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(shared))
    return places.tolist(), values.mean(0), std


def leave_curves(run: Run) -> None:
    """curves.png, once a round was done."""
    if run.rows:
        run_figure(run.rows, run.config.title(), run.folder / "curves.png")
