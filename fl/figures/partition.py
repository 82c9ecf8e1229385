"""A picture of which client holds what."""

from pathlib import Path

import numpy as np
from matplotlib.colors import ListedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator
from torch import Tensor

from fl.figures.structure import COLORS
from fl.figures.style import save, shorten
from fl.partition import Partition, counts

_NEAREST = 0.09  # share of the colour bar between two ticks


def draw(partition: Partition, labels: Tensor, classes: int, title: str, path: Path) -> None:
    """Clients x classes, coloured by the number of samples. Beside it are the clients' sizes, and the clusters if there
    are any.

    Raises FLError for a file that cannot be written.
    """
    save(partition_map(partition, labels, classes, title), path)


def partition_map(partition: Partition, labels: Tensor, classes: int, title: str) -> Figure:
    """The figure of `draw`."""
    table, structure = counts(partition, labels, classes), partition.structure.numpy()
    clients, levels = len(table), len(structure)
    grouped = any(1 < len(np.unique(level)) < clients for level in structure)
    figure = Figure(figsize=(9.5, min(9.0, max(3.6, 1.6 + 0.12 * clients))), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08)
    widths = [*([0.5 + 0.25 * levels] if grouped else []), 7, 1.6]
    *left, middle, right = figure.subplots(1, len(widths), sharey=True, width_ratios=widths)

    if grouped:
        colors = ListedColormap(COLORS)
        left[0].imshow(
            structure.T % colors.N, aspect="auto", cmap=colors, interpolation="nearest", vmin=0, vmax=colors.N - 1
        )
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
    first = [*left, middle][0]
    first.set_ylabel("client")
    first.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    first.set_ylim(clients - 0.5, -0.5)
    figure.suptitle(shorten(title), fontsize=11)
    return figure


def _ticks(largest: int) -> list[int]:
    """Whole numbers of a scale that goes by the square root, which do not stand too near to each other.

    >>> _ticks(19), _ticks(3), _ticks(1)
    ([0, 1, 2, 5, 10, 19], [0, 1, 2, 3], [0, 1])
    """
    steps = [step * 10**power for power in range(len(str(largest))) for step in (1, 2, 5)]
    ticks = [0]
    for step in [step for step in steps if step < largest]:
        if min(step**0.5 - ticks[-1] ** 0.5, largest**0.5 - step**0.5) >= _NEAREST * largest**0.5:
            ticks.append(step)
    return [*ticks, largest]
