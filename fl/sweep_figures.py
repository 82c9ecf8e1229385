"""Pictures of a sweep: learning curves, and what they end in against the swept value."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl.compare import Run, have_own, outcome
from fl.plot import curve, finish, legend_below, mark_levels, new_levels, save

_GREY, _STYLES = "0.45", ("--", ":", "-.")  # of references
_ROOM = 40  # characters that stand side by side below an axis

Found = Mapping[tuple[str, str], Sequence[Run]]
"""(value, method) -> one run a seed; the value of a method that does not read the option is ""."""


def curves_figure(option: str, found: Found, title: str, path: Path) -> None:
    """Accuracy (of text perplexity) round by round: of several methods a panel a value with a line a method (FedMR's
    Fig. 10), of one method a line a value (Figs. 11 and 12). What does not read the option is dashed.

    Where all runs have clients that test on samples of their own, it is their mean accuracy there. A vertical line is
    where the first run of a line begins to train another level, and the legend says so.
    """
    key = "local_test_accuracy" if _own(found) else _metric(found)
    values = list(dict.fromkeys(text for text, _ in found if text))
    methods = list(dict.fromkeys(method for text, method in found if text))
    short = option.rpartition(".")[2]
    references = {f"{method} (no {short})": runs for (text, method), runs in found.items() if not text}
    if len(methods) > 1:
        panels = {f"{short} = {text}": {m: found[text, m] for m in methods if (text, m) in found} for text in values}
    else:
        panels = {methods[0]: {f"{short} = {text}": found[text, methods[0]] for text in values}}
    columns = len(panels) if len(panels) < 5 else 3
    rows = math.ceil(len(panels) / columns)
    size = (5.2, 3.6) if len(panels) == 1 else (1 + 2.7 * columns, 0.5 + 2.6 * rows)
    figure = Figure(figsize=size, layout="constrained")
    axes = np.atleast_1d(figure.subplots(rows, columns, sharey=True)).flatten()
    for axis, (head, lines) in zip(axes, panels.items()):
        for color, (label, runs) in enumerate(lines.items()):
            color = methods.index(label) if len(methods) > 1 else color
            curve(axis, [run.rows for run in runs], key, label, f"C{color}")
            mark_levels(axis, runs[0].rows, f"C{color}")
        for style, (label, runs) in zip(itertools.cycle(_STYLES), references.items()):
            curve(axis, [run.rows for run in runs], key, label, _GREY, style)
            mark_levels(axis, runs[0].rows, _GREY)
        finish(axis, key)
        axis.label_outer()
        axis.set_title(head, fontsize=10)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    marked = [method for (_, method), runs in found.items() if new_levels(runs[0].rows)]
    legend_below(figure, int(7 * size[0]), marked)
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def values_figure(option: str, found: Found, title: str, path: Path) -> None:
    """The last accuracy (of text perplexity) against the value: mean and standard deviation over seeds, a line a
    method. Beside it, where all runs have them, accuracies on clients' own test data (`own_accuracy` of
    `fl.compare.outcome`).

    Numbers have their place on the axis, logarithmic if they are positive and span a factor of ten; others stand side
    by side in the order given.
    """
    keys = {_metric(found): _metric(found)}
    if _own(found):
        keys["own_accuracy"] = "local_test_accuracy"
    figure = Figure(figsize=(5.2 * len(keys), 3.8), layout="constrained")
    for axis, (key, label) in zip(np.atleast_1d(figure.subplots(1, len(keys))), keys.items()):
        finish(axis, label)
        _values(axis, option, found, key)
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def _values(axis: Axes, option: str, found: Found, key: str) -> None:
    """One result of `fl.compare.outcome` against the value."""
    values = list(dict.fromkeys(text for text, _ in found if text))
    places = positions(values)
    for color, method in enumerate(dict.fromkeys(method for text, method in found if text)):
        order = sorted((k for k, text in enumerate(values) if (text, method) in found), key=lambda k: places[k])
        mean, std = zip(*[_spread(found[values[k], method], key) for k in order])
        at = [places[k] for k in order]
        several = any(len(found[values[k], method]) > 1 for k in order)  # one seed has no deviation to show
        axis.errorbar(
            at,
            mean,
            std if several else None,
            marker="o",
            ms=4,
            capsize=3,
            elinewidth=1,
            color=f"C{color}",
            label=method,
        )
    styles = itertools.cycle(_STYLES)
    for (text, method), runs in found.items():
        if not text:
            mean, std = _spread(runs, key)
            axis.axhline(mean, ls=next(styles), color=_GREY, lw=1.2, label=f"{method} (no {option.rpartition('.')[2]})")
            axis.axhspan(mean - std, mean + std, color=_GREY, alpha=0.15, lw=0)
    if min(places) > 0 and max(places) >= 10 * min(places):
        axis.set_xscale("log")
    axis.set_xticks(places, values)
    if sum(map(len, values)) > _ROOM:
        axis.tick_params(axis="x", labelrotation=25, labelsize=8)
        for tick in axis.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor")
    axis.minorticks_off()
    axis.set_xlabel(option)
    axis.legend(frameon=False, fontsize=8)


def positions(values: Sequence[str]) -> list[float]:
    """Where values stand on an axis: at what they are, or one after another where some is no number.

    >>> positions(["5", "20"]), positions(["layer", "block"])
    ([5.0, 20.0], [0, 1])
    """
    try:
        return [float(text) for text in values]
    except ValueError:
        return list(range(len(values)))


def _own(found: Found) -> bool:
    return have_own([outcome(run) for runs in found.values() for run in runs])


def _metric(found: Found) -> str:
    text = all("perplexity" in outcome(run) for runs in found.values() for run in runs)
    return "perplexity" if text else "accuracy"


def _spread(runs: Sequence[Run], key: str) -> tuple[float, float]:
    values = [outcome(run)[key] for run in runs]
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
