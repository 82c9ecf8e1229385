"""Maps of clients: the samples that they hold, and the models that they share."""

import textwrap
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator
from torch import Tensor

from fl.analysis.structure import Structure, agreement
from fl.base.errors import FLError
from fl.figures.style import save, shorten
from fl.partition import counts
from fl.partition.kind import Partition
from fl.runs.state import RunState

CLUSTERS = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442", "#870f2d", "#0000ff", "#69e1b4",
    "#4b3c78", "#8778ff", "#5a00b4", "#964b1e", "#a5d2ff", "#785a78", "#a5ffa5", "#96b487", "#d20fc3", "#f0c378",
    "#a5f0e1", "#ff78d2", "#695af0", "#5a785a", "#783c5a",
]  # fmt: skip
"""Colours of clusters: first Okabe and Ito's; each of the others differs much from all before it, to
colour-blind eyes too, and is bright enough for black lines to be seen on it."""
MOST = 12
"""The most runs in one figure."""
ONE, OWN = len(CLUSTERS), len(CLUSTERS) + 1
"""The colours of a level with one model for all, and of one with a model for each client."""
_MAP = ListedColormap([*CLUSTERS, "0.35", "0.7"])
_KEY = (
    "colour: model or cluster (each level for itself; dark grey: one for all, light grey: one each); white: none; "
    "hatched: not trained yet; black line: neighbours differ; ARI: adjusted Rand index with the truth, 1 is the same "
    "clusters, 0 as by chance"
)
_MODELS = {"global": "one for all", "personal": "one each"}


def structure_maps(structures: Sequence[Structure]) -> Figure:
    """Draw the truth of each run beside the models it found.

    A column is a level, a row a client, a colour a model. Below a level is the share of clients with a model if not all
    kept one, and the largest adjusted Rand index with a level of the truth, and with which if there are several. Raises
    FLError for too many runs.
    """
    if len(structures) > MOST:
        raise FLError(f"{len(structures)} runs are too many for one figure: give at most {MOST}")
    most = max(1.8, min(7.0 if len(structures) == 1 else 3.5, 18 / len(structures)))
    heights = [1.2 + min(most, max(1.8, 0.07 * structure.clients)) for structure in structures]
    widths = [(0.75 * len(structure.truth), 0.85 * len(structure.levels)) for structure in structures]
    width = max(4.2, 1.1 + max(map(sum, widths)))
    figure = Figure(figsize=(width, 0.3 + sum(heights)), layout="constrained")
    rows = figure.subfigures(len(structures), 1, height_ratios=heights, squeeze=False)[:, 0]
    for row, structure, ratios in zip(rows, structures, widths):
        row.suptitle(textwrap.fill(shorten(structure.title), int(13 * width)), fontsize=9)
        truth, models = row.subplots(1, 2, sharey=True, width_ratios=ratios)
        _draw_truth(truth, structure)
        _draw_found(models, structure)
    figure.supxlabel(textwrap.fill(_KEY, int(16 * width)), fontsize=8, color="0.3")
    return figure


def _draw_truth(axis: Axes, structure: Structure) -> None:
    numbers = [len(set(level)) for level in structure.truth]
    kinds = [{1: ONE, structure.clients: OWN}.get(number) for number in numbers]
    _levels(
        axis,
        structure.truth,
        kinds,
        [f"level {level}\n{_number(number, 'cluster')}" for level, number in enumerate(numbers, 1)],
    )
    axis.set_title("truth", fontsize=9)
    axis.yaxis.label.set_size(8)
    axis.tick_params(axis="y", labelsize=7)
    _label_clients(axis, structure.clients, structure.names)


def _number(number: int, noun: str) -> str:
    """Count things.

    >>> _number(1, "model"), _number(5, "model")
    ('1 model', '5 models')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def _label_clients(axis: Axes, clients: int, names: Sequence[str]) -> None:
    """Name the clients, the rows from top to bottom; number them if they are many."""
    axis.set_ylabel("client")
    if names and clients <= _MOST_NAMES:
        axis.set_yticks(range(clients), [name if len(name) <= 24 else f"{name[:23]}…" for name in names], fontsize=7)
    else:
        axis.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    axis.set_ylim(clients - 0.5, -0.5)


def _draw_found(axis: Axes, structure: Structure) -> None:
    names = [_MODELS.get(name) or _number(int(name), "model") for name in structure.levels]
    labels = [f"level {level}\n{name}" for level, name in enumerate(names, 1)]
    for level, row in enumerate(agreement(structure)[: structure.trained]):
        if row.best is not None:
            if row.kept < 1:
                labels[level] += f"\n{min(row.kept, 0.99):.0%} of clients"  # 100% would mean that none is missing
            labels[level] += f"\nARI {row.best:.2f}"
            if len(structure.truth) > 1:
                labels[level] += f"\nwith level {row.rand.index(row.best) + 1}"
    kinds = [{"global": ONE, "personal": OWN}.get(name) for name in structure.levels]
    trained = [
        models if level < structure.trained else [-1] * structure.clients
        for level, models in enumerate(structure.found)
    ]
    _levels(axis, trained, kinds, labels)
    for level in range(structure.trained, len(structure.levels)):
        axis.axvspan(level - 0.5, level + 0.5, facecolor="none", edgecolor="0.8", hatch="////", lw=0)
    axis.set_title(f"{structure.algorithm}, seed {structure.seed}", fontsize=9)
    axis.tick_params(axis="y", left=False, labelleft=False)


def _levels(axis: Axes, levels: Sequence[Sequence[int]], kinds: Sequence[int | None], labels: Sequence[str]) -> None:
    """Colour the cells of levels [levels, clients], and mark where clusters change.

    Args:
        kinds: the colour of each level, ONE or OWN; None for clusters, which have several.
    """
    table = np.array([_cells(level, kind) for level, kind in zip(levels, kinds)])
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


def _cells(level: Sequence[int], kind: int | None) -> list[int]:
    """Choose the colour of each client, -1 for no model.

    All models have the colour `kind` if that is given. Else they are numbered in the order in which they appear, so
    that clusters that agree with the truth look like it.
    """
    order = {model: place % len(CLUSTERS) for place, model in enumerate(dict.fromkeys(m for m in level if m >= 0))}
    return [-1 if model < 0 else order[model] if kind is None else kind for model in level]


def leave_structure(run: RunState) -> None:
    """Write structure.json and structure.png, of methods with models on levels."""
    if structure := Structure.of(run):
        structure.save(run.folder)
        save(structure_maps([structure]), run.folder / "structure.png")


_MOST_NAMES = 50  # clients that are named in a figure
_NEAREST = 0.09  # share of the colour bar between two ticks


def partition_map(partition: Partition, labels: Tensor, classes: int, title: str, names: Sequence[str] = ()) -> Figure:
    """Draw clients x classes, coloured by the number of samples.

    Beside it are the clients' sizes, and the clusters if there are any. Clients may have names.
    """
    table, structure = counts(partition, labels, classes), partition.structure.numpy()
    clients, levels = len(table), len(structure)
    grouped = any(1 < len(np.unique(level)) < clients for level in structure)
    figure = Figure(figsize=(9.5, min(9.0, max(3.6, 1.6 + 0.12 * clients))), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08)
    widths = [*([0.5 + 0.25 * levels] if grouped else []), 7, 1.6]
    *left, middle, right = figure.subplots(1, len(widths), sharey=True, width_ratios=widths)

    if grouped:
        look = {"cmap": ListedColormap(CLUSTERS), "vmin": 0, "vmax": len(CLUSTERS) - 1}
        left[0].imshow(structure.T % len(CLUSTERS), aspect="auto", interpolation="nearest", **look)
        left[0].set_xticks(range(levels), [str(level + 1) for level in range(levels)])
        left[0].set_xlabel("cluster\non level" if levels > 1 else "cluster")
        for boundary in np.flatnonzero(np.diff(structure, axis=1).any(0)) + 0.5:
            left[0].axhline(boundary, color="white", lw=0.8)
            middle.axhline(boundary, color="0.6", lw=0.5)
        kinds = "colours on the left: a client's cluster, on each level for itself"
        figure.supxlabel(kinds, fontsize=8, color="0.3", x=0.01, ha="left")

    norm = PowerNorm(0.5, vmin=0, vmax=max(1, table.max()))
    image = middle.imshow(table, aspect="auto", cmap="Blues", interpolation="nearest", norm=norm)
    middle.set_xlabel("class")
    middle.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True, min_n_ticks=1))
    bar = figure.colorbar(image, ax=middle, label="samples (colour: by their square root)", pad=0.01, fraction=0.04)
    bar.ax.yaxis.set_major_locator(FixedLocator(_ticks(int(norm.vmax))))
    bar.ax.minorticks_off()

    right.barh(np.arange(clients), table.sum(1), height=0.9 if clients <= 60 else 1.0, color="#0072b2")
    right.set_xlabel("samples in all")
    right.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True, steps=[1, 2, 5, 10]))
    right.spines[["top", "right"]].set_visible(False)
    _label_clients([*left, middle][0], clients, names)
    figure.suptitle(shorten(title), fontsize=11)
    return figure


def _ticks(largest: int) -> list[int]:
    """Choose whole numbers, well apart, for a scale that goes by the square root.

    >>> _ticks(19), _ticks(3), _ticks(1)
    ([0, 1, 2, 5, 10, 19], [0, 1, 2, 3], [0, 1])
    """
    steps = [step * 10**power for power in range(len(str(largest))) for step in (1, 2, 5)]
    ticks = [0]
    for step in [step for step in steps if step < largest]:
        if min(step**0.5 - ticks[-1] ** 0.5, largest**0.5 - step**0.5) >= _NEAREST * largest**0.5:
            ticks.append(step)
    return [*ticks, largest]
