"""Curves of runs, round by round."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl.figures.style import dress, finish, save
from fl.runs.artifact import Artifact
from fl.runs.metrics import Row
from fl.runs.simulation import Simulation


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
    dress(axes[0], "accuracy", percent=True)

    axes[1].plot(*series(rows, "loss"), color="C0", label="test, global model")
    axes[1].plot(*series(rows, "train_loss"), color="C3", lw=1.2, label="training, mean over participants")
    text = any("perplexity" in row for row in rows)
    dress(axes[1], "cross entropy of a token" if text else "cross entropy")
    if with_cosine:
        axes[2].plot(*series(rows, "models_cosine"), color="C0")
        finish(axes[2], "models_cosine")
    for axis in axes:
        mark_levels(axis, rows, "C0", named=True)
    figure.suptitle(title, fontsize=11)
    save(figure, path)


def curve(
    axis: Axes, runs: Sequence[Sequence[Row]], key: str, label: str, color: str, style: str = "-", along: str = "round"
) -> None:
    """Mean and one standard deviation of a column over runs, round by round. The end of the curve has a dot if it lies
    straight above or below the point before it, as for a method whose last rounds send nothing.
    """
    at, mean, std = mean_and_std(runs, key, along)
    axis.plot(at, mean, style, color=color, label=label)
    axis.fill_between(at, mean - std, mean + std, color=color, alpha=0.2, lw=0)
    if len(at) > 1 and at[-1] == at[-2]:
        axis.scatter(at[-1], mean[-1], s=16, color=color, zorder=3)


def mean_and_std(
    runs: Sequence[Sequence[Row]], key: str, along: str = "round"
) -> tuple[list[float], np.ndarray, np.ndarray]:
    """(places, mean, sample standard deviation) over the runs, in the rounds that all of them measured. The places are
    the means of the column `along` in these rounds.

    >>> mean_and_std([[{"round": 1, "loss": 1.0}], [{"round": 1, "loss": 3.0}]], "loss")[:2]
    ([1.0], array([2.]))
    """
    columns = [{row["round"]: (row[along], row[key]) for row in rows if key in row} for rows in runs]
    shared = sorted(set.intersection(*(set(column) for column in columns)))
    pairs = np.array([[column[r] for r in shared] for column in columns]).reshape(len(runs), -1, 2)
    places, values = pairs[..., 0].mean(0), pairs[..., 1]
    std = values.std(0, ddof=1) if len(runs) > 1 else np.zeros(len(shared))
    return places.tolist(), values.mean(0), std


def _leave(run: Simulation) -> None:
    if run.rows:
        run_figure(run.rows, run.config.title(), run.folder / "curves.png")


ARTIFACT = Artifact(_leave)
