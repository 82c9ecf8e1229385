"""Figures of a sweep: learning curves, and last results against the swept value or the two swept values."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm, Normalize
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from fl.algorithms import ALGORITHMS
from fl.analysis.groups import Found, have_client_scores, mean_and_spread, others, outcome
from fl.base.columns import Column
from fl.figures.curves import (
    MUTED,
    Line,
    Look,
    Panel,
    draw_level,
    draw_panels,
    explain,
    finish_panel,
    looks_of,
    new_figure,
    parts,
    seeds_note,
)
from fl.figures.style import caption, save, shorten, within
from fl.runs.columns import columns, first_score

_ROOM = 40  # characters that stand side by side below an axis
_ASKEW: dict[str, Any] = {"rotation": 25, "fontsize": 8, "ha": "right", "rotation_mode": "anchor"}
_LETTER, _WORD, _WIDE = 0.08, 8, 11  # of a heat map: inches of a letter, letters that stand level, inches of all panels
_STEP = 0.015  # share of an axis between points of several lines at one value


def curves_figure(option: str, found: Found, title: str, path: Path) -> None:
    """Draw accuracy (of text: perplexity) round by round.

    If all runs have clients that test on samples of their own, it is their mean accuracy there. With several methods
    there is a panel for each value, with a line for each method (FedMR's Fig. 10); with one method there is a line for
    each value (Figs. 11 and 12). Methods that do not read the option are dashed.
    """
    key = _score([outcome(run) for runs in found.values() for run in runs])
    short = _short(option)
    several = len({method for text, method in found if text}) > 1
    heads: dict[str, list[Line]] = {}
    references = []
    for (text, method), runs in found.items():
        rows, value = [run.rows for run in runs], f"{short} = {text}"
        if text:
            heads.setdefault(value if several else method, []).append(Line(method if several else value, rows, method))
        else:
            references.append(Line(method, rows, method, True))
    lines = [line for members in heads.values() for line in members] + references
    shown = []
    for head, members in heads.items():
        for part in parts(lines):
            labels = [line.label for line in part]
            front, behind = ([line for line in members if (line.label in labels) is k] for k in (True, False))
            shown.append(Panel(key, front + references, behind, head))
    wide = min(2 if len(shown) <= 6 else 3, len(shown))
    high = math.ceil(len(shown) / wide)
    figure = new_figure(max(6.4, 3.8 * wide), high)
    axes = figure.subplots(high, wide, squeeze=False, sharey=True).flatten()
    for axis in axes[len(shown) :]:
        axis.remove()
    draw_panels(figure, axes, shown, lines, title, notes=_note(references, short))
    save(figure, path)


def values_figure(option: str, found: Found, title: str, path: Path) -> None:
    """Draw the last accuracy (of text: perplexity) against the value, with one line a method.

    A line has mean and standard deviation over seeds. Below it are the accuracies on clients' own test data, if all
    runs have them, and the other columns that have a label, if any run has them.
    """
    results = {at: [outcome(run) for run in runs] for at, runs in found.items()}
    every = [result for members in results.values() for result in members]
    keys = [_metric(every), *([f"local_test_{first_score(every[0])}"] if have_client_scores(every) else [])]
    keys += [name for name, one in others().items() if one.label and any(name in result for result in every)]
    values = list(dict.fromkeys(text for text, _ in found if text))
    lines = [Line(m, [], m, not read) for read in (True, False) for m in {m: 0 for t, m in found if bool(t) is read}]
    looks, together = looks_of(lines), parts(lines)
    figure = new_figure(0.6 + 4.8 * len(together), len(keys))
    grid = figure.subplots(len(keys), len(together), squeeze=False, sharey="row")
    for axes, key in zip(grid, keys):
        having = {at: members for at, members in results.items() if all(key in result for result in members)}
        spreads = {at: mean_and_spread([result[key] for result in members]) for at, members in having.items()}
        for axis, part in zip(axes, together):
            _values(axis, lines, part, looks, values, spreads, columns([key])[key].ends)
        for axis in axes:
            finish_panel(axis, key, xlabel=option)
            _name_values(axis, values)
    references = [line for line in lines if line.reference]
    notes = [seeds_note([len(runs) for runs in found.values()], "bar or band" if references else "bar")]
    figure.suptitle(shorten(title), fontsize=11)
    explain(figure, lines, looks, [*notes, *_note(references, _short(option))])
    save(figure, path)


def grid_figure(options: Mapping[str, Sequence[str]], found: Found, title: str, path: Path) -> None:
    """Draw a heat map for each method: the score that curves show, at the end, for each pair of values of two options.

    Values of the first option go down, those of the second to the right; a number is the mean over seeds. All maps have
    the same colours, of which the brighter are the better. Where a method does not read one of the options, a number
    stands once for all of its values.
    """
    results = {at: [outcome(run) for run in runs] for at, runs in found.items()}
    key = _score([result for members in results.values() for result in members])
    column, methods = columns([key])[key], list(dict.fromkeys(at[-1] for at in found))
    means = {at: float(np.mean([result[key] for result in members])) for at, members in results.items()}
    (down, rows), (right, cols) = options.items()
    cells = {(*at, name): _cell(found, *at, name) for name in methods for at in product(rows, cols)}

    askew = max(map(len, cols)) > _WORD
    letters = max(map(len, [*map(column.number, means.values()), *([] if askew else cols)]))
    panel = len(cols) * (_LETTER * letters + 0.25) + _LETTER * max(map(len, rows)) + 0.6
    wide = max(1, min(len(methods), int(_WIDE / panel)))
    high = math.ceil(len(methods) / wide)
    figure = new_figure(max(5.5, wide * panel + 1), high)
    figure.set_figheight(0.7 + high * (1 + 0.4 * len(rows)))
    axes = figure.subplots(high, wide, squeeze=False).flatten()
    for axis in axes[len(methods) :]:
        axis.remove()
    colors = ScalarMappable(_norm(column, list(means.values())), "cividis_r" if column.falls else "cividis")
    for axis, method in zip(axes, methods):
        table = [[means.get(cells[row, col, method], math.nan) for col in cols] for row in rows]
        axis.imshow(np.ma.masked_invalid(table), colors.cmap, colors.norm, aspect="auto", interpolation="nearest")
        places: dict[tuple[str, ...], list[tuple[int, int]]] = {}
        for x, y in np.ndindex(len(cols), len(rows)):
            places.setdefault(cells[rows[y], cols[x], method], []).append((x, y))
        for at, members in places.items():
            mean = means.get(at, math.nan)
            dark = math.isfinite(mean) and np.dot(colors.to_rgba(mean)[:3], (0.3, 0.59, 0.11)) < 0.5
            text = column.number(mean) if at in means else "–"
            axis.text(*np.mean(members, axis=0), text, ha="center", va="center", color="white" if dark else "black")
            size = np.ptp(members, axis=0) + 1
            axis.add_patch(Rectangle(np.min(members, axis=0) - 0.5, *size, fill=False, edgecolor="white"))
        axis.set_title(method, fontsize=10)
        axis.set(xlabel=right, ylabel=down)
        axis.set_xticks(range(len(cols)), cols, **(_ASKEW if askew else {}))
        axis.set_yticks(range(len(rows)), rows)
        axis.tick_params(length=0)
    unit = "%" if column.factor == 100 else ""
    decades = column.log and colors.norm.vmax > 10 * colors.norm.vmin
    ticks = LogLocator(numticks=4) if decades else MaxNLocator(4)
    bar = figure.colorbar(colors, ax=list(axes[: len(methods)]), ticks=ticks, pad=0.02, aspect=20 * high)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{round(column.factor * value, 6):g}{unit}")
    bar.ax.minorticks_off()
    what = " ".join((column.label or column.heading).split())
    figure.suptitle(f"{shorten(title)}\n{what}{' in %' if unit else ''}", fontsize=11)
    numbers = list(dict.fromkeys(sorted(len(runs) for runs in found.values())))
    few = f"{numbers[0]} to " if len(numbers) > 1 else ""
    notes = ["the brighter the better", *([f"mean over {few}{numbers[-1]} seeds"] if numbers[-1] > 1 else [])]
    notes += ["a number across several cells: a method that does not read the option"] * any("" in at for at in found)
    notes += ["–: no run, since training failed"] * any(at not in found for at in cells.values())
    caption(figure, notes)
    save(figure, path)


def _cell(found: Found, row: str, col: str, method: str) -> tuple[str, ...]:
    """Find the key of the runs with two values, either of which the method may not read; as given if there are none."""
    keys = [(*pair, method) for pair in product((row, ""), (col, ""))]
    return next((key for key in keys if key in found), keys[0])


def _norm(column: Column, values: Sequence[float]) -> Normalize:
    """Make a scale of colours that spans the values, and as much as an axis of the column does."""
    finite = [value for value in values if math.isfinite(value)] or [1.0]
    low, high = min(finite), max(finite)
    if column.log:
        return LogNorm(low, max(high, low * (1 + column.span)))
    return Normalize(*within(low, high, column.span, *column.ends))


def _values(
    axis: Axes,
    lines: Sequence[Line],
    part: Sequence[Line],
    looks: Mapping[str, Look],
    values: Sequence[str],
    spreads: Mapping[tuple[str, str], tuple[float, float]],
    ends: tuple[float, float],
) -> None:
    """Draw mean and standard deviation of the lines at each value, within the ends; lines of other parts are grey.
    Points of several lines at one value stand a little beside each other.
    """
    places, scale = positions(values)
    axis.set_xscale(scale, **({"linthresh": min(place for place in places if place > 0)} if scale == "symlog" else {}))
    shown = axis.xaxis.get_transform().transform(np.array(places, float))
    colored = [line for line in part if not line.reference]
    for line in lines:
        look = looks[line.label]
        if line.reference:
            if ("", line.method) in spreads:
                draw_level(axis, line.label, look, *spreads["", line.method], ends)
            continue
        here = [k for k in np.argsort(shown) if (values[k], line.method) in spreads]
        mean, std = np.array([spreads[values[k], line.method] for k in here]).reshape(-1, 2).T
        if line not in part:
            axis.plot([places[k] for k in here], mean, "o-", ms=3, **MUTED)
            continue
        step = _STEP * (np.ptp(shown) or 1.0) * (colored.index(line) - (len(colored) - 1) / 2)
        at = axis.xaxis.get_transform().inverted().transform(shown[here] + step)
        axis.plot(at, mean, marker="o", ms=4, label=line.label, **look)
        if std.any():  # one seed has no deviation to show
            bars = mean - np.clip(mean - std, *ends), np.clip(mean + std, *ends) - mean
            axis.errorbar(at, mean, bars, fmt="none", capsize=3, elinewidth=1, ecolor=look["color"])


def _name_values(axis: Axes, values: Sequence[str]) -> None:
    """Write the swept values below an axis: words askew if they are long, numbers where they do not touch others."""
    places, _ = positions(values)
    numbers = isinstance(places[0], float)
    shown = axis.xaxis.get_transform().transform(np.array(places, float))
    *others, last = np.argsort(shown, kind="stable")
    named = [last]
    for at in others:
        room = [(1 + len(values[at]) + len(values[k])) / 2 / _ROOM * (np.ptp(shown) or 1.0) for k in named]
        if not numbers or (abs(shown[at] - shown[named]) >= room).all():
            named.append(at)
    texts = [value if at in named else "" for at, value in enumerate(values)]
    axis.set_xticks(places, texts, **(_ASKEW if not numbers and sum(map(len, values)) > _ROOM else {}))
    axis.xaxis.set_minor_locator(NullLocator())


def positions(values: Sequence[str]) -> tuple[list[float], str]:
    """Find the places of values on an axis, and its scale.

    Those that are not numbers stand side by side in their order. Numbers stand at their own place; the scale is
    logarithmic if they are positive and span a factor of ten, and if there is a 0 as well linear below the least of the
    others.

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
    """Drop the method's name from a method's option: "unit" of "fedmr.unit"."""
    owner, _, name = option.rpartition(".")
    return name if owner.replace("-", "_") in ALGORITHMS else option


def _note(references: Sequence[Line], short: str) -> list[str]:
    return [f"broken grey line: a method that does not read {short}"] if references else []


def _score(results: Sequence[Mapping[str, float]]) -> str:
    """Choose what stands for a run: the score on clients' own test data if all have some, else of the global model."""
    return f"local_test_{first_score(results[0])}" if have_client_scores(results) else _metric(results)


def _metric(results: Sequence[Mapping[str, float]]) -> str:
    return "perplexity" if all("perplexity" in result for result in results) else first_score(results[0])
