"""A picture of which client holds what."""

from pathlib import Path

import numpy as np
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from fl.figures.style import save
from fl.partition.counts import counts
from fl.partition.kind import Partition


def draw(partition: Partition, labels: Tensor, classes: int, title: str, path: Path) -> None:
    """Clients x classes, coloured by the number of samples. Beside it are the clients' sizes, and the clusters if there
    are any.

    Raises FLError for a file that cannot be written.
    """
    table, structure = counts(partition, labels, classes), partition.structure.numpy()
    clients, levels = len(table), len(structure)
    grouped = any(1 < len(np.unique(level)) < clients for level in structure)
    figure = Figure(figsize=(9.5, min(9.0, max(3.6, 1.6 + 0.12 * clients))), layout="constrained")
    widths = [*([0.35 + 0.25 * levels] if grouped else []), 7, 1.6]
    *left, middle, right = figure.subplots(1, len(widths), sharey=True, width_ratios=widths)

    if grouped:
        left[0].imshow(structure.T % 20, aspect="auto", cmap="tab20", interpolation="nearest", vmin=0, vmax=19)
        left[0].set_xticks(range(levels), [str(level + 1) for level in range(levels)])
        left[0].set_xlabel("cluster on level" if levels > 1 else "cluster")
        for boundary in np.flatnonzero(np.diff(structure, axis=1).any(0)) + 0.5:
            left[0].axhline(boundary, color="white", lw=0.8)
            middle.axhline(boundary, color="0.6", lw=0.5)

    image = middle.imshow(table, aspect="auto", cmap="Blues", interpolation="nearest", norm=PowerNorm(0.5, vmin=0))
    middle.set_xlabel("class")
    middle.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    figure.colorbar(image, ax=middle, label="samples", pad=0.01, fraction=0.04)

    right.barh(np.arange(clients), table.sum(1), height=0.9 if clients <= 60 else 1.0, color="C0")
    right.set_xlabel("samples in all")
    right.xaxis.set_major_locator(MaxNLocator(nbins=3, integer=True))
    right.spines[["top", "right"]].set_visible(False)
    first = [*left, middle][0]
    first.set_ylabel("client")
    first.yaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    first.set_ylim(clients - 0.5, -0.5)
    figure.suptitle(title, fontsize=11)
    save(figure, path)
