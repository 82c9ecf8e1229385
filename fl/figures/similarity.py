"""Heat maps of how alike blocks are (FedFA, appendix 0.B)."""

import math
import textwrap
from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from fl.analysis.similarity import Compared
from fl.base.errors import FLError
from fl.figures.style import shorten
from surgery import SectionSimilarity

_MOST = 6  # models in one figure
_KEY = (
    "blocks by their names in the model; without --first a section's first block, whose shapes may differ, is left out"
)
_WRITTEN = 5  # with more blocks than these, a panel does not show its numbers


def heat_maps(found: Sequence[Compared]) -> Figure:
    """A panel for each section of each model: blocks x blocks, the mean over convolutions. Trained models are below
    untrained ones, and all panels have the same colours. Raises FLError for too many models.
    """
    if len(found) > _MOST:
        raise FLError(f"{len(found)} models are too many for one figure: give at most {_MOST}")
    rows = [2 if one.after else 1 for one in found]
    columns = max(len(one.before) for one in found)
    width = max(4.8, 1.6 + 2.1 * columns)
    titles = [textwrap.fill(shorten(one.title), int(12 * width)) for one in found]
    heights = [0.95 + 0.2 * title.count("\n") + 2.0 * n for title, n in zip(titles, rows)]
    figure = Figure(figsize=(width, 0.3 + sum(heights)), layout="constrained")
    parts = figure.subfigures(len(found), 1, squeeze=False, height_ratios=heights)[:, 0]
    matrices = [section.matrix for one in found for part in (one.before, one.after or []) for section in part]
    apart = torch.cat([matrix[~torch.eye(len(matrix), dtype=torch.bool)] for matrix in matrices])
    apart = apart[~apart.isnan()]
    low, high = math.floor(10 * apart.min().item()) / 10, math.ceil(10 * apart.max().item()) / 10
    for part, title, one, number in zip(parts, titles, found, rows):
        panels = part.subplots(number, columns, squeeze=False)
        for stage, sections, line in zip(("untrained", "trained"), (one.before, one.after or []), panels):
            for panel, section in zip(line, sections):
                image = _panel(panel, section, low, high)
            for panel in line[len(sections) :]:
                panel.set_visible(False)
            line[0].set_ylabel(f"{stage}\nblock", fontsize=8)
        for top, bottom, section in zip(panels[0], panels[-1], one.before):
            top.set_title(section.name, fontsize=9)
            bottom.set_xlabel("block", fontsize=8)
        part.suptitle(title, fontsize=10)
        bar = part.colorbar(image, ax=panels, pad=0.02, aspect=14 * number, shrink=0.9)
        bar.set_label("mean similarity", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    figure.supxlabel(textwrap.fill(_KEY, int(16 * width)), fontsize=8, color="0.3")
    return figure


def _panel(panel: Axes, section: SectionSimilarity, low: float, high: float) -> AxesImage:
    """One heat map. The diagonal (a block and itself) and pairs without a value are grey."""
    size = len(section.blocks)
    values = section.matrix.clone().fill_diagonal_(float("nan"))
    panel.set_facecolor("0.88")
    image = panel.imshow(values.numpy(), vmin=low, vmax=high, cmap="cividis", interpolation="nearest")
    start = len(_parent(section.blocks))
    step = 1 if size <= 8 else -(-size // 8)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_ticks(range(0, size, step), [block[start:] for block in section.blocks[::step]], fontsize=7)
    if size <= _WRITTEN:
        for i, row in enumerate(values.tolist()):
            for j, value in enumerate(row):
                if value == value:
                    color = "white" if value < (low + high) / 2 else "black"
                    panel.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7.5, color=color)
    return image


def _parent(blocks: Sequence[str]) -> str:
    """The common beginning of the names, up to a dot.

    >>> _parent(["section1.1", "section1.12"])
    'section1.'
    """
    common = blocks[0]
    while not all(block.startswith(common) for block in blocks) or (common and not common.endswith(".")):
        common = common[:-1]
    return common
