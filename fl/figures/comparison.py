"""Runs side by side: a figure, and the table beside it."""

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl.analysis.costs import check_target
from fl.analysis.groups import AGAINST, along, common, find_runs, group, target_table
from fl.analysis.outcome import table
from fl.base.columns import Due
from fl.base.flags import choice
from fl.figures.curves import curve, mark_levels, new_levels
from fl.figures.style import finish, legend_below, save
from fl.runs.columns import columns
from fl.runs.metrics import Row, selected


def comparison_figure(
    groups: Mapping[str, Sequence[Sequence[Row]]], title: str, path: Path, along: str = "round"
) -> None:
    """Curves of several methods: mean and one standard deviation over their runs.

    Scores on clients' own test data are drawn if all runs have them. A vertical line marks the round in which the first
    run of a method begins to train another level, and the legend says so.

    Args:
        groups: from a label, whose first word is the method, to the rows of each of its runs (one run a seed).
        along: the column that curves are drawn against. If it stays 0, such as the traffic of a method that sends
            nothing, the method is a dashed horizontal line with the value of its selected round, see
            `fl.runs.metrics.selected`.
    """
    keys = panels([set().union(*rows) for runs in groups.values() for rows in runs])
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


def panels(measured: Sequence[Collection[str]]) -> list[str]:
    """The columns that have curves: those with a label, the global model's first.

    Args:
        measured: the columns that each run has.

    >>> panels([{"accuracy", "loss", "models_cosine", "local_test_accuracy"}])
    ['accuracy', 'local_test_accuracy', 'loss', 'models_cosine']
    """
    labelled = {name: column for name, column in columns().items() if column.label}
    keys = [name for due in get_args(Due) for name, column in labelled.items() if column.due == due]
    own = "local_test_accuracy"
    keys = ["accuracy", own, *(name for name in keys if name not in ("accuracy", own))]  # to compare the two
    left_out = set() if all(own in names for names in measured) else {own}
    if all("perplexity" in names for names in measured):
        left_out.add("loss")  # of which the perplexity is the exponential
    return [key for key in keys if key not in left_out and any(key in names for names in measured)]


def _constant(axis: Axes, runs: Sequence[Sequence[Row]], key: str, label: str, color: str) -> None:
    """A horizontal line: mean and one standard deviation over runs of a column in their selected rounds."""
    values = [row[key] for row in map(selected, runs) if key in row]
    if values:
        mean, std = np.mean(values), np.std(values, ddof=1) if len(values) > 1 else 0.0
        axis.axhline(mean, ls="--", color=color, lw=1.2, label=label)
        axis.axhspan(mean - std, mean + std, color=color, alpha=0.15, lw=0)


def compare(folders: Sequence[Path], out: Path, against: str = "rounds", target: float | None = None) -> str:
    """Draw the runs of the folders into one figure, against one of `AGAINST`, and return the table; with a target, a
    second table is below it.
    """
    check(against, target)
    groups = group(find_runs(folders))
    tables = [table(groups)] + ([] if target is None else [target_table(groups, target)])
    title = common([run.config for runs in groups.values() for run in runs])
    rows = {label: [along(run, against) for run in runs] for label, runs in groups.items()}
    comparison_figure(rows, title, out, AGAINST[against])
    return "\n\n".join(tables)


def check(against: str, target: float | None) -> None:
    """Raise FLError if curves cannot be drawn against this, or the target makes no sense."""
    choice("--against", [against], AGAINST)
    if target is not None:
        check_target(target)
