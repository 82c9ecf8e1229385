"""Figures of trained models of different size: how alike blocks are, and how weights are distributed."""

import math
import textwrap
from collections.abc import Sequence
from itertools import takewhile

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from benchmarks.papers.models.similarity import SectionSimilarity
from benchmarks.papers.models.weights import Compared, Member, ends
from fl.base.errors import FLError
from fl.figures.style import COLORS, caption, shorten
from fl.models.fleet import brief

_MAPS = 6  # models in one figure
_KEY = (
    "blocks by their names in the model; without --first a section's first block, whose shapes may differ, is left out"
)
_WRITTEN = 5  # with more blocks than these, a panel does not show its numbers


def heat_maps(compared: Sequence[Compared]) -> Figure:
    """Draw a panel for each section of each model: blocks x blocks, the mean over convolutions.

    Trained models are below untrained ones, and all panels have the same colours. Raises FLError for too many models.
    """
    if len(compared) > _MAPS:
        raise FLError(f"{len(compared)} models are too many for one figure: give at most {_MAPS}")
    rows = [2 if entry.after else 1 for entry in compared]
    columns = max(len(entry.before) for entry in compared)
    width = max(4.8, 1.6 + 2.1 * columns)
    titles = [textwrap.fill(shorten(entry.title), int(12 * width)) for entry in compared]
    heights = [0.95 + 0.2 * title.count("\n") + 2.0 * n for title, n in zip(titles, rows)]
    figure = Figure(figsize=(width, 0.3 + sum(heights)), layout="constrained")
    parts = figure.subfigures(len(compared), 1, squeeze=False, height_ratios=heights)[:, 0]
    matrices = [section.matrix for entry in compared for part in (entry.before, entry.after) for section in part]
    values = torch.cat([matrix[~torch.eye(len(matrix), dtype=torch.bool)] for matrix in matrices])
    values = values[~values.isnan()]
    low, high = math.floor(10 * values.min().item()) / 10, math.ceil(10 * values.max().item()) / 10
    for part, title, entry, number in zip(parts, titles, compared, rows):
        panels = part.subplots(number, columns, squeeze=False)
        for stage, sections, line in zip(("untrained", "trained"), (entry.before, entry.after), panels):
            for panel, section in zip(line, sections):
                image = _heat_map(panel, section, low, high)
            for panel in line[len(sections) :]:
                panel.set_visible(False)
            line[0].set_ylabel(f"{stage}\nblock", fontsize=8)
        for top, bottom, section in zip(panels[0], panels[-1], entry.before):
            top.set_title(section.name, fontsize=9)
            bottom.set_xlabel("block", fontsize=8)
        part.suptitle(title, fontsize=10)
        bar = part.colorbar(image, ax=panels, pad=0.02, aspect=14 * number, shrink=0.9)
        bar.set_label("mean similarity", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    figure.supxlabel(textwrap.fill(_KEY, int(16 * width)), fontsize=8, color="0.3")
    return figure


def _heat_map(panel: Axes, section: SectionSimilarity, low: float, high: float) -> AxesImage:
    """Draw one heat map. The diagonal (a block and itself) and pairs without a value are grey."""
    size = len(section.blocks)
    values = section.matrix.clone().fill_diagonal_(float("nan"))
    panel.set_facecolor("0.88")
    image = panel.imshow(values.numpy(), vmin=low, vmax=high, cmap="cividis", interpolation="nearest")
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*section.blocks))
    start = "".join(letters[0] for letters in same).rfind(".") + 1  # the names after their common beginning
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


_STYLES = ["-", "--", "-.", ":"]  # that also differ in black and white
_MEMBERS = 12  # lines that differ
_BINS = 8  # at least
_SHOWN = 0.998  # share of a model's weights that lie within the axis


def histograms(members: Sequence[Member]) -> Figure:
    """Draw the distribution of the weights of each model's first and last convolution.

    There is a line for each model (FedFA, Figs. 7-9).

    Raises FLError for too many models.
    """
    if len(members) > _MEMBERS:
        raise FLError(f"{len(members)} models are too many for one figure: give at most {_MEMBERS}")
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12)
    weights = [[tensor.flatten().numpy() for tensor in ends(member).values()] for member in members]
    for panel, title, at in zip(figure.subplots(1, 2), ("first convolution", "last convolution"), (0, -1)):
        chosen = [arrays[at] for arrays in weights]
        edge = max(np.quantile(np.abs(values), _SHOWN) for values in chosen) or 1.0
        for number, (label, values) in enumerate(zip(_labels(members), chosen)):
            bins = np.linspace(-edge, edge, max(_BINS, round(2 * len(values) ** (1 / 3))) + 1)  # Rice's rule
            share = np.histogram(values, bins)[0] / len(values) / (bins[1] - bins[0])
            dash = _STYLES[(number + number // len(COLORS)) % len(_STYLES)]
            look = {"color": COLORS[number % len(COLORS)], "ls": dash}
            panel.plot((bins[:-1] + bins[1:]) / 2, share, label=label, lw=1.4, **look)
        panel.set(title=title, xlabel="weight", ylabel="density", xlim=(-edge, edge))
        panel.title.set_fontsize(10)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{members[0].spec.name}: weights of models of different size", fontsize=11)
    caption(figure, [], {line.get_label(): line for line in figure.axes[0].lines})
    return figure


def _labels(members: Sequence[Member]) -> list[str]:
    """Label the models by width and depth, and by the folder where these are equal."""
    sizes = [
        f"width {brief(member.spec.width)}" + (f", depth {brief(member.spec.depth)}" if member.spec.depth else "")
        for member in members
    ]
    return [
        size if sizes.count(size) == 1 else f"{size} ({shorten(member.name)})" for member, size in zip(members, sizes)
    ]
