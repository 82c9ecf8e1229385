"""Figures of loss landscapes around trained models."""

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator

from fl.analysis.landscape import Landscape
from fl.base.errors import FLError
from fl.figures.style import save, shorten

_TITLE = 30  # characters of a line above a panel
_LEAST = 1.1  # the colours span at least this factor, so that rounding does not fill them


def draw_landscapes(landscapes: Sequence[Landscape], title: str, label: str, path: Path) -> None:
    """Draw a panel for each model with levels and contours of the loss.

    They are logarithmic and the same in all panels.
    """
    columns = min(len(landscapes), 2 if len(landscapes) <= 4 else 4)
    rows = math.ceil(len(landscapes) / columns)
    figure = Figure(figsize=(1.2 + 2.6 * columns, 0.7 + 2.75 * rows), layout="constrained")
    figure.get_layout_engine().set(wspace=0.05)
    panels = np.atleast_1d(figure.subplots(rows, columns, sharex=True, sharey=True)).flatten()
    finite = torch.cat([landscape.values[landscape.values.isfinite()] for landscape in landscapes])
    if not len(finite):
        raise FLError(
            f"{landscapes[0].title}: no loss is finite, so there is nothing to draw; choose a smaller --radius"
        )
    low, high = max(finite.min().item(), 1e-6), finite.max().item()
    high = max(high, low * _LEAST)
    levels = np.geomspace(low, high, 19)
    norm = LogNorm(low, high)
    for panel, landscape in zip(panels, landscapes):
        z = landscape.values.nan_to_num(high, high).clamp(low, high).T.numpy()  # a to the right, b upwards
        axis = landscape.axis.numpy()
        filled = panel.contourf(axis, axis, z, levels, norm=norm, cmap="viridis")
        filled.set_rasterized(True)
        panel.contour(axis, axis, z, levels[::2], colors="white", linewidths=0.5, alpha=0.7)
        panel.plot(0, 0, marker="+", color="red", ms=9, mew=1.6)
        panel.set_aspect("equal")
        for side in (panel.xaxis, panel.yaxis):
            side.set_major_locator(MaxNLocator(nbins=4))
        panel.tick_params(labelsize=8)
        name = textwrap.fill(shorten(landscape.title), _TITLE)
        panel.set_title(f"{name}\nloss {landscape.centre:#.3g}, mean rise {landscape.rise()[0]:#.3g}", fontsize=9)
    for panel in panels[len(landscapes) :]:
        panel.set_visible(False)
    figure.supxlabel("first direction (in norms of the filters)", fontsize=9)
    figure.supylabel("second direction", fontsize=9)
    ticks = LogLocator(subs=(1, 2, 5) if high / low < 1e4 else (1,), numticks=99).tick_values(low, high)
    inside = ticks[(low <= ticks) & (ticks <= high)]
    shown = inside if len(inside) > 1 else [low, high]
    bar = figure.colorbar(filled, ax=list(panels), label=label, pad=0.02, ticks=shown, format="%.3g")
    bar.ax.minorticks_off()
    figure.suptitle(title, fontsize=10)
    save(figure, path)
