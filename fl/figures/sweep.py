"""Pictures of a sweep: learning curves, and their ends against the swept value."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from fl.algorithms import ALGORITHMS
from fl.analysis.groups import common
from fl.analysis.outcome import Run, have_own, others, outcome, table
from fl.analysis.sweep_table import write_results
from fl.base.files import write_text
from fl.base.tables import fitted
from fl.figures.lines import (
    MUTED,
    Line,
    Style,
    draw_lines,
    name_ends,
    name_lines,
    name_styles,
    parts,
    seeds_note,
    styles,
)
from fl.figures.style import finish, save, shorten
from fl.runs.columns import columns
from fl.runs.metrics import Row

_HIGH = 3.2  # inches of a panel
_ROOM = 40  # characters that stand side by side below an axis
_STEP = 0.015  # share of an axis between what lines have at one value

Found = Mapping[tuple[str, str], Sequence[Run]]
"""(value, method) -> one run a seed; the value of a method that does not read the option is ""."""


def curves_figure(option: str, found: Found, title: str, path: Path) -> None:
    """Accuracy (of text: perplexity) round by round. With several methods there is a panel for each value, with a line
    for each method (FedMR's Fig. 10); with one method there is a line for each value (Figs. 11 and 12). Methods that do
    not read the option are dashed.

    If all runs have clients that test on samples of their own, it is their mean accuracy there. A vertical line marks
    the round in which the first run of a line begins to train another level, and the caption says so.
    """
    key = "local_test_accuracy" if _own(found) else _metric(found)
    values = list(dict.fromkeys(text for text, _ in found if text))
    methods = list(dict.fromkeys(method for text, method in found if text))
    short = _short(option)
    several = len(methods) > 1
    lines = {
        (text, method): Line(method if several else f"{short} = {text}", _rows(runs), method)
        for (text, method), runs in found.items()
        if text
    }
    references = [Line(m, _rows(runs), m, True) for (text, m), runs in found.items() if not text]
    together = parts([*{line.label: line for line in lines.values()}.values(), *references])
    looks = styles(together)
    panels = []
    for head in values if several else methods:
        mine = [line for at, line in lines.items() if at[not several] == head]
        for part in together:
            labels = [line.label for line in part]
            shown = [line for line in mine if line.label in labels]
            behind = [line for line in mine if line.label not in labels]
            panels.append((f"{short} = {head}" if several else head, shown + references, behind))
    wide = min(2 if len(panels) <= 6 else 3, len(panels))
    high = math.ceil(len(panels) / wide)
    figure = Figure(figsize=(max(6.4, 3.8 * wide), _HIGH * high), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    axes = figure.subplots(high, wide, squeeze=False).flatten()
    for number, (axis, (head, part, behind)) in enumerate(zip(axes, panels)):
        draw_lines(axis, key, part, looks, behind)
        if number % wide:
            axis.set_ylabel("")
        axis.set_title(head, fontsize=10)
    for axis in axes[len(panels) :]:
        axis.remove()
    name_ends(axes[: len(panels)], looks, _HIGH)
    name_lines(figure, [*lines.values(), *references], looks, notes=_note(references, short))
    figure.suptitle(shorten(title), fontsize=10)
    save(figure, path)


def values_figure(option: str, found: Found, title: str, path: Path) -> None:
    """The last accuracy (of text: perplexity) against the value: mean and standard deviation over seeds, one line
    a method. Below it are the accuracies on clients' own test data (`own_accuracy` of
    `fl.analysis.outcome.outcome`), if all runs have them, and the other columns that have a label, such as the success
    of a trigger, if any run has them.
    """
    keys = {_metric(found): _metric(found)}
    if _own(found):
        keys["own_accuracy"] = "local_test_accuracy"
    known = set().union(*(outcome(run) for runs in found.values() for run in runs))
    keys |= {name: name for name, column in others().items() if column.label and name in known}
    values = list(dict.fromkeys(text for text, _ in found if text))
    own, references = (list(dict.fromkeys(m for text, m in found if bool(text) is kind)) for kind in (True, False))
    lines = [Line(method, [], method) for method in own]
    lines += [Line(method, [], method, True) for method in references]
    together = parts(lines)
    looks = styles(together)
    figure = Figure(figsize=(0.6 + 4.8 * len(together), _HIGH * len(keys)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    for row, (key, column) in zip(figure.subplots(len(keys), len(together), squeeze=False), keys.items()):
        spreads = {at: _spread(runs, key) for at, runs in found.items() if all(key in outcome(run) for run in runs)}
        for axis, part in zip(row, together):
            places = _scale(axis, values)
            beside = [line for line in part if not line.reference]
            for line in lines:
                look = looks[line.label] if line in part else None
                steps = beside.index(line) - (len(beside) - 1) / 2 if line in beside else 0
                _values(axis, line, look, values, _moved(axis, places, steps), spreads, columns()[column].ends)
            finish(axis, column)
            axis.set_xlabel(option)
            _ticks(axis, values, places)
        name_ends(row, looks, _HIGH)
    notes = [seeds_note([len(runs) for runs in found.values()], "bar or band" if references else "bar")]
    name_styles(figure, lines, looks, notes + _note(references, _short(option)))
    figure.suptitle(shorten(title), fontsize=10)
    save(figure, path)


def _values(
    axis: Axes,
    line: Line,
    look: Style | None,
    values: Sequence[str],
    places: Sequence[float],
    spreads: Mapping[tuple[str, str], tuple[float, float]],
    ends: tuple[float, float],
) -> None:
    """Mean and standard deviation of a line's results at each value, within the ends; grey if it has no look."""
    if line.reference and look and ("", line.method) in spreads:
        mean, std = spreads["", line.method]
        axis.axhline(mean, ls=look.dash, color=look.color, lw=1.2, label=line.label)
        axis.axhspan(*np.clip([mean - std, mean + std], *ends), color=look.color, alpha=0.15, lw=0)
    order = [k for k in np.argsort(places) if (values[k], line.method) in spreads]
    if line.reference or not order:
        return
    at = [places[k] for k in order]
    mean, std = (np.array(numbers) for numbers in zip(*(spreads[values[k], line.method] for k in order)))
    if not look:
        axis.plot(at, mean, "o-", ms=3, label=f"_{line.label}", **MUTED)
        return
    axis.plot(at, mean, "o-", ms=4, color=look.color, label=line.label)
    if std.any():  # one seed has no deviation to show
        bars = mean - np.clip(mean - std, *ends), np.clip(mean + std, *ends) - mean
        axis.errorbar(at, mean, bars, fmt="none", capsize=3, elinewidth=1, ecolor=look.color)


def _scale(axis: Axes, values: Sequence[str]) -> list[float]:
    """Give an axis the scale that suits the swept values, and return their places."""
    places, scale = positions(values)
    least = {"linthresh": min(place for place in places if place > 0)} if scale == "symlog" else {}
    axis.set_xscale(scale, **least)
    return places


def _moved(axis: Axes, places: Sequence[float], steps: float) -> Sequence[float]:
    """Places a little to the right by so many steps, so that what is at one value does not hide each other."""
    if not steps:
        return places
    scale = axis.xaxis.get_transform()
    shown = scale.transform(np.array(places, float))
    return scale.inverted().transform(shown + _STEP * steps * (np.ptp(shown) or 1.0))


def _ticks(axis: Axes, values: Sequence[str], places: Sequence[float]) -> None:
    """The swept values below an axis: words askew if they are long, numbers where there is room."""
    numbers = isinstance(places[0], float)
    axis.set_xticks(places, _with_room(axis, values, places) if numbers else values)
    axis.xaxis.set_minor_locator(NullLocator())
    if not numbers and sum(map(len, values)) > _ROOM:
        axis.tick_params(axis="x", labelrotation=25, labelsize=8)
        for tick in axis.get_xticklabels():
            tick.set(ha="right", rotation_mode="anchor")


def _with_room(axis: Axes, values: Sequence[str], places: Sequence[float]) -> list[str]:
    """The values, empty where they would touch one before them or the largest."""
    shown = axis.xaxis.get_transform().transform(np.array(places, float))
    *middle, last = np.argsort(shown, kind="stable")
    room = (np.ptp(shown) or 1.0) / _ROOM

    def apart(a: int, b: int) -> bool:
        return abs(shown[a] - shown[b]) >= room * (1 + len(values[a]) + len(values[b])) / 2

    kept = [last]
    for at in middle:
        if all(apart(at, other) for other in kept):
            kept.append(at)
    return [value if at in kept else "" for at, value in enumerate(values)]


def positions(values: Sequence[str]) -> tuple[list[float], str]:
    """The places of values on an axis, and its scale: those that are not numbers stand side by side in their order.

    Numbers stand at their own place; the scale is logarithmic if they are positive and span a factor of ten, and if
    there is a 0 as well linear below the least of the others.

    >>> positions(["5", "20"]), positions(["layer", "block"]), positions(["0.2", "0", "0.01"])
    (([5.0, 20.0], 'linear'), ([0, 1], 'linear'), ([0.2, 0.0, 0.01], 'symlog'))
    """
    try:
        numbers = [float(text) for text in values]
    except ValueError:
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        return list(range(len(values))), "linear"
    above = [number for number in numbers if number > 0]
    if min(numbers) < 0 or not above or max(above) < 10 * min(above):
        return numbers, "linear"
    return numbers, "log" if len(above) == len(numbers) else "symlog"


def _short(option: str) -> str:
    """An option of a method without the method's name.

    >>> _short("fedmr.segment-fraction"), _short("attack.share")
    ('segment-fraction', 'attack.share')
    """
    owner, _, name = option.rpartition(".")
    return name if owner.replace("-", "_") in ALGORITHMS else option


def _note(references: Sequence[object], short: str) -> list[str]:
    return [f"broken grey line: a method that does not read {short}"] if references else []


def _rows(runs: Sequence[Run]) -> list[list[Row]]:
    return [run.rows for run in runs]


def _own(found: Found) -> bool:
    return have_own([outcome(run) for runs in found.values() for run in runs])


def _metric(found: Found) -> str:
    text = all("perplexity" in outcome(run) for runs in found.values() for run in runs)
    return "perplexity" if text else "accuracy"


def _spread(runs: Sequence[Run], key: str) -> tuple[float, float]:
    values = [outcome(run)[key] for run in runs]
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def report(option: str, found: Found, folder: Path) -> str:
    """Write the table, as text and as CSV, and the figures; return the table, fitted to the terminal."""
    labels = {(text, m): f"{option}={text} {m}" if text else f"{m} (no {option})" for text, m in found}
    groups = {labels[key]: runs for key, runs in found.items()}
    write_text(folder / "sweep.txt", table(groups) + "\n")
    write_results(option, found, folder / "sweep.csv")
    title = common([run.config for runs in found.values() for run in runs])
    curves_figure(option, found, title, folder / "curves.png")
    values_figure(option, found, title, folder / "values.png")
    return table(groups, fitted)
