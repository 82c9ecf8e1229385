"""Loss landscapes side by side."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fl.analysis.landscape import Landscape
from fl.base.errors import FLError
from fl.figures.style import save

_LEAST = 1.1  # the colours span at least this factor, so that rounding does not fill them


def draw_figure(found: Sequence[Landscape], title: str, what: str, path: Path) -> None:
    """A panel for each model with levels and contours of the loss, which are logarithmic and the same in all panels."""
    columns = min(len(found), 2 if len(found) <= 4 else 4)
    rows = math.ceil(len(found) / columns)
    figure = Figure(figsize=(1.2 + 2.6 * columns, 0.7 + 2.75 * rows), layout="constrained")
    figure.get_layout_engine().set(wspace=0.05)
    panels = np.atleast_1d(figure.subplots(rows, columns, sharex=True, sharey=True)).flatten()
    finite = torch.cat([one.values[one.values.isfinite()] for one in found])
    if not len(finite):
        raise FLError(f"{found[0].title}: no loss is finite, so there is nothing to draw; choose a smaller --radius")
    low, high = max(finite.min().item(), 1e-6), finite.max().item()
    high = max(high, low * _LEAST)
    levels = np.geomspace(low, high, 19)
    norm = LogNorm(low, high)
    for panel, one in zip(panels, found):
        z = one.values.nan_to_num(high, high).clamp(low, high).T.numpy()  # a to the right, b upwards
        axis = one.axis.numpy()
        filled = panel.contourf(axis, axis, z, levels, norm=norm, cmap="viridis")
        filled.set_rasterized(True)
        panel.contour(axis, axis, z, levels[::2], colors="white", linewidths=0.5, alpha=0.7)
        panel.plot(0, 0, marker="+", color="red", ms=9, mew=1.6)
        panel.set_aspect("equal")
        for side in (panel.xaxis, panel.yaxis):
            side.set_major_locator(MaxNLocator(nbins=4))
        panel.tick_params(labelsize=8)
        panel.set_title(f"{one.title}\nloss {one.centre:#.3g}, mean rise {one.mean:#.3g}", fontsize=9)
    for panel in panels[len(found) :]:
        panel.set_visible(False)
    figure.supxlabel("first direction (in norms of the filters)", fontsize=9)
    figure.supylabel("second direction", fontsize=9)
    bar = figure.colorbar(filled, ax=list(panels), label=what, pad=0.02, ticks=_ticks(low, high), format="%.3g")
    bar.ax.minorticks_off()
    figure.suptitle(title, fontsize=10)
    save(figure, path)


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers for a logarithmic scale, or its two ends.

    >>> _ticks(0.3, 30.0), _ticks(1.3, 1.4)
    ([0.5, 1.0, 2.0, 5.0, 10.0, 20.0], [1.3, 1.4])
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 1e4 else (1,)
    inside = [float(f"{step}e{n}") for n in decades for step in steps if low <= float(f"{step}e{n}") <= high]
    return inside if len(inside) > 1 else [low, high]
