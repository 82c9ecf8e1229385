"""Pictures of a sweep: learning curves, and their ends against the swept value."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl.algorithms import ALGORITHMS
from fl.analysis.groups import common
from fl.analysis.outcome import Run, have_own, others, outcome, table
from fl.analysis.sweep_table import write_results
from fl.base.files import write_text
from fl.figures.curves import curve, mark_levels, new_levels
from fl.figures.style import finish, legend_below, save

_GREY, _STYLES = "0.45", ("--", ":", "-.")  # of references
_ROOM = 40  # characters that stand side by side below an axis
_NEAREST = 0.08  # share of an axis between two places whose names do not touch

Found = Mapping[tuple[str, str], Sequence[Run]]
"""(value, method) -> one run a seed; the value of a method that does not read the option is ""."""


def curves_figure(option: str, found: Found, title: str, path: Path) -> None:
    """Accuracy (of text: perplexity) round by round. With several methods there is a panel for each value, with a line
    for each method (FedMR's Fig. 10); with one method there is a line for each value (Figs. 11 and 12). Methods that do
    not read the option are dashed.

    If all runs have clients that test on samples of their own, it is their mean accuracy there. A vertical line marks
    the round in which the first run of a line begins to train another level, and the legend says so.
    """
    key = "local_test_accuracy" if _own(found) else _metric(found)
    values = list(dict.fromkeys(text for text, _ in found if text))
    methods = list(dict.fromkeys(method for text, method in found if text))
    short = _short(option)
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
    """The last accuracy (of text: perplexity) against the value: mean and standard deviation over seeds, one line
    a method. Beside it are the accuracies on clients' own test data (`own_accuracy` of
    `fl.analysis.outcome.outcome`), if all runs have them, and the other columns that have a label, such as the success
    of a trigger, if any run has them.
    """
    keys = {_metric(found): _metric(found)}
    if _own(found):
        keys["own_accuracy"] = "local_test_accuracy"
    known = set().union(*(outcome(run) for runs in found.values() for run in runs))
    keys |= {name: name for name, column in others().items() if column.label and name in known}
    figure = Figure(figsize=(5.2 * len(keys), 3.8), layout="constrained")
    for axis, (key, label) in zip(np.atleast_1d(figure.subplots(1, len(keys))), keys.items()):
        finish(axis, label)
        _values(axis, option, found, key)
    legend_below(figure, 36 * len(keys))
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def _values(axis: Axes, option: str, found: Found, key: str) -> None:
    """One result of `fl.analysis.outcome.outcome` against the value, for the runs that have it."""
    found = {at: runs for at, runs in found.items() if all(key in outcome(run) for run in runs)}
    values = list(dict.fromkeys(text for text, _ in found if text))
    places, scale = positions(values)
    for color, method in enumerate(dict.fromkeys(method for text, method in found if text)):
        order = sorted((k for k, text in enumerate(values) if (text, method) in found), key=lambda k: places[k])
        mean, std = zip(*[_spread(found[values[k], method], key) for k in order])
        at = [places[k] for k in order]
        several = any(len(found[values[k], method]) > 1 for k in order)  # one seed has no deviation to show
        axis.plot(at, mean, "o-", ms=4, color=f"C{color}", label=method)
        if several:
            axis.errorbar(at, mean, std, fmt="none", capsize=3, elinewidth=1, ecolor=f"C{color}")
    styles = itertools.cycle(_STYLES)
    for (text, method), runs in found.items():
        if not text:
            mean, std = _spread(runs, key)
            axis.axhline(mean, ls=next(styles), color=_GREY, lw=1.2, label=f"{method} (no {_short(option)})")
            axis.axhspan(mean - std, mean + std, color=_GREY, alpha=0.15, lw=0)
    axis.set_xscale(scale)
    axis.set_xticks(places, values)
    if sum(map(len, values)) > _ROOM:
        axis.tick_params(axis="x", labelrotation=25, labelsize=8)
        for tick in axis.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor")
    axis.minorticks_off()
    axis.set_xlabel(option)


def positions(values: Sequence[str]) -> tuple[list[float], str]:
    """The places of values on an axis, and its scale.

    Numbers stand at their own place; the scale is logarithmic if they are positive and span a factor of ten. If some
    are too near to each other they stand side by side in their order, and if some are not numbers in the given order.

    >>> positions(["5", "20"]), positions(["layer", "block"]), positions(["0.2", "0", "0.01"])
    (([5.0, 20.0], 'linear'), ([0, 1], 'linear'), ([2, 0, 1], 'linear'))
    """
    try:
        numbers = [float(text) for text in values]
    except ValueError:
        return list(range(len(values))), "linear"
    order = sorted(numbers)
    scale = "log" if order[0] > 0 and order[-1] >= 10 * order[0] else "linear"
    at = list(map(math.log, order)) if scale == "log" else order
    if min((b - a for a, b in itertools.pairwise(at)), default=math.inf) < _NEAREST * (at[-1] - at[0]):
        return [order.index(number) for number in numbers], "linear"
    return numbers, scale


def _short(option: str) -> str:
    """An option of a method without the method's name.

    >>> _short("fedmr.fraction"), _short("attack.share")
    ('fraction', 'attack.share')
    """
    owner, _, name = option.rpartition(".")
    return name if owner.replace("-", "_") in ALGORITHMS else option


def _own(found: Found) -> bool:
    return have_own([outcome(run) for runs in found.values() for run in runs])


def _metric(found: Found) -> str:
    text = all("perplexity" in outcome(run) for runs in found.values() for run in runs)
    return "perplexity" if text else "accuracy"


def _spread(runs: Sequence[Run], key: str) -> tuple[float, float]:
    values = [outcome(run)[key] for run in runs]
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def report(option: str, found: Found, folder: Path) -> str:
    """Write the table, as text and as CSV, and the figures; return the table."""
    labels = {(text, m): f"{option}={text} {m}" if text else f"{m} (no {option})" for text, m in found}
    text = table({labels[key]: runs for key, runs in found.items()})
    write_text(folder / "sweep.txt", text + "\n")
    write_results(option, found, folder / "sweep.csv")
    title = common([run.config for runs in found.values() for run in runs])
    curves_figure(option, found, title, folder / "curves.png")
    values_figure(option, found, title, folder / "values.png")
    return text
