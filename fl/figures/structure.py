"""Structure maps: who has which model on each level, beside the truth (FeMAM, Figs. 4, A.1 and C.2)."""

import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fl.analysis.structure import Structure, agreement
from fl.base.errors import FLError
from fl.figures.style import save, shorten
from fl.runs.run import Run

COLORS = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#870f2d", "#0000ff", "#69e1b4",
    "#4b3c78", "#8778ff", "#5a00b4", "#964b1e", "#a5d2ff", "#785a78", "#a5ffa5", "#96b487", "#d20fc3", "#f0c378",
    "#a5f0e1", "#ff78d2", "#695af0", "#5a785a", "#783c5a",
]  # fmt: skip
"""Of clusters: first those of Okabe and Ito; each of the others differs much from all before it, to colour-blind eyes
too, and is bright enough for black lines to be seen on it."""
MOST = 12
"""Runs in one figure."""
ONE, OWN = len(COLORS), len(COLORS) + 1
"""The colours of a level with one model for all, and of one with a model for each client."""
_MAP = ListedColormap([*COLORS, "0.35", "0.7"])
_KEY = (
    "colour: model or cluster (each level for itself; dark grey: one for all, light grey: one each); white: none; "
    "hatched: not trained yet; black line: neighbours differ"
)


def draw(structures: Sequence[Structure], path: Path) -> None:
    """Write the maps of runs, one below the other. Raises FLError as `maps` does, and if the file cannot be written."""
    save(maps(structures), path)


def maps(structures: Sequence[Structure]) -> Figure:
    """The truth of each run beside what it found: a column is a level, a row a client, a colour a model.

    Below a level is its largest adjusted Rand index, the share of clients with a model if not all kept one, and the
    level of the truth that the index is for if there are several.

    Raises FLError for too many runs.
    """
    if len(structures) > MOST:
        raise FLError(f"{len(structures)} runs are too many for one figure: give at most {MOST}")
    most = max(1.8, min(7.0 if len(structures) == 1 else 3.5, 18 / len(structures)))
    heights = [1.2 + min(most, max(1.8, 0.07 * one.clients)) for one in structures]
    widths = [(0.45 * len(one.truth), 0.62 * len(one.levels)) for one in structures]
    width = max(4.2, 1.1 + max(map(sum, widths)))
    figure = Figure(figsize=(width, 0.3 + sum(heights)), layout="constrained")
    rows = figure.subfigures(len(structures), 1, height_ratios=heights, squeeze=False)[:, 0]
    for row, one, ratios in zip(rows, structures, widths):
        row.suptitle(textwrap.fill(shorten(one.title), int(13 * width)), fontsize=9)
        truth, found = row.subplots(1, 2, sharey=True, width_ratios=ratios)
        _draw_truth(truth, one)
        _draw_found(found, one)
    figure.supxlabel(textwrap.fill(_KEY, int(16 * width)), fontsize=8, color="0.3")
    return figure


def _draw_truth(axis: Axes, one: Structure) -> None:
    numbers = [len(set(level)) for level in one.truth]
    kinds = [{1: ONE, one.clients: OWN}.get(number) for number in numbers]
    _panel(axis, one.truth, kinds, [f"{level}\n{number}" for level, number in enumerate(numbers, 1)])
    axis.set_title("truth", fontsize=9)
    axis.set_xlabel("level, clusters", fontsize=8)
    axis.set_ylabel("client", fontsize=8)
    axis.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    axis.tick_params(axis="y", labelsize=7)


def _draw_found(axis: Axes, one: Structure) -> None:
    labels = [f"{level}\n{name}" for level, name in enumerate(one.levels, 1)]
    for level, row in enumerate(agreement(one)[: one.trained]):
        if row.best is not None:
            labels[level] += f"\nARI {row.best:.2f}"
            if row.kept < 1:
                labels[level] += f"\nof {min(row.kept, 0.99):.0%}"  # 100% would mean that none is missing
            if len(one.truth) > 1:
                labels[level] += f"\n(truth {row.rand.index(row.best) + 1})"
    kinds = [{"global": ONE, "personal": OWN}.get(name) for name in one.levels]
    trained = [models if level < one.trained else [-1] * one.clients for level, models in enumerate(one.found)]
    _panel(axis, trained, kinds, labels)
    for level in range(one.trained, len(one.levels)):
        axis.axvspan(level - 0.5, level + 0.5, facecolor="none", edgecolor="0.8", hatch="////", lw=0)
    axis.set_title(f"{one.algorithm}, seed {one.seed}", fontsize=9)
    axis.set_xlabel("level, models", fontsize=8)
    axis.tick_params(axis="y", left=False, labelleft=False)


def _panel(axis: Axes, levels: Sequence[Sequence[int]], kinds: Sequence[int | None], labels: Sequence[str]) -> None:
    """Colour the cells of levels [levels, clients] and mark where neighbours within a level are in different clusters.

    Args:
        kinds: the colour of each level, ONE or OWN; None for clusters, which have several.
    """
    table = np.array([cells(level, kind) for level, kind in zip(levels, kinds)])
    clients = table.shape[1]
    image = np.ma.masked_less(table.T, 0)
    axis.imshow(image, cmap=_MAP, vmin=0, vmax=_MAP.N - 1, aspect="auto", interpolation="nearest")
    for level, (members, kind) in enumerate(zip(levels, kinds)):
        if kind is None:
            above, below = np.asarray(members[:-1]), np.asarray(members[1:])
            at = np.flatnonzero((above != below) & (above >= 0) & (below >= 0)) + 0.5
            axis.hlines(at, level - 0.5, level + 0.5, color="black", lw=1.0)
    axis.vlines(np.arange(1, len(levels)) - 0.5, -0.5, clients - 0.5, color="0.6", lw=0.6)
    axis.set_xticks(range(len(labels)), labels, fontsize=7)
    axis.set_xlim(-0.5, len(levels) - 0.5)
    axis.set_ylim(clients - 0.5, -0.5)


def cells(level: Sequence[int], kind: int | None = None) -> list[int]:
    """The colour of each client, -1 for no model. All models have the colour `kind` if that is given. Else they are
    numbered in the order in which they appear, so that clusters that agree with the truth look like it.

    >>> cells([4, 4, -1, 0, 4]), cells([3, -1], kind=OWN) == [OWN, -1]
    ([0, 0, -1, 1, 0], True)
    """
    order = {model: place % len(COLORS) for place, model in enumerate(dict.fromkeys(m for m in level if m >= 0))}
    return [-1 if model < 0 else order[model] if kind is None else kind for model in level]


def leave_structure(run: Run) -> None:
    """structure.json and structure.png, of methods with models on levels."""
    if structure := Structure.of(run):
        structure.save(run.folder)
        draw([structure], run.folder / "structure.png")
