"""Maps that show which clients cover which part of the global model.

FedFA, section 3.1 and Fig. 1, calls parts with few clients weak points.

A part that few clients cover can be changed at will by these few. A last block that is grafted onto deeper ones covers
these as well.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from torch import Tensor

from fl.base.errors import FLError
from fl.figures.style import save, shorten
from fl.models.fleet import remove_grafting
from fl.runs.state import RunState
from surgery import Plan, sections

_GRID = 400  # positions of a row
_NAMED = 45  # with more rows than these, blocks are named instead of rows


def coverage_maps(panels: Mapping[str, Sequence[Plan]], title: str) -> Figure:
    """Draw maps side by side: the share of clients that cover each part of layers.

    A row is a layer (a weight with two axes or more); the first is next to the input. Along a row are its outputs, in
    percent of the full width. Thin lines separate blocks, thick ones sections.

    Args:
        panels: from a title to the plans of all clients, which are of one global model. Panels may differ in it.

    Raises FLError as `coverage` does, and for a model without such layers.
    """
    tables = [_rows(plans) for plans in panels.values()]
    height = 1.3 + max(min(9.0, max(1.5, 0.19 * len(rows))) for rows, _ in tables)
    figure = Figure(figsize=(2 + 4.1 * len(tables), height), layout="constrained")
    figure.get_layout_engine().set(wspace=0.06)
    axes = figure.subplots(1, len(tables), squeeze=False)[0]
    same = all(names == tables[0][1] for _, names in tables)
    for axis, (rows, names), label in zip(axes, tables, panels):
        image = axis.imshow(
            rows, aspect="auto", cmap="viridis", vmin=0, vmax=1, extent=(0, 100, len(rows), 0), interpolation="nearest"
        )
        axis.set_title(shorten(label), fontsize=10)
        _mark(axis, names, named=axis is axes[0] or not same)
    figure.suptitle(shorten(title), fontsize=11)
    figure.supxlabel("outputs of the layer (% of the full width)", fontsize=9)
    bar = figure.colorbar(
        image, ax=list(axes), label="share of the clients that cover an output\n(mean over inputs)", pad=0.02, aspect=30
    )
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    bar.ax.tick_params(labelsize=8)
    return figure


def _rows(plans: Sequence[Plan]) -> tuple[np.ndarray, list[tuple[str, str, str]]]:
    """Compute shares [layers, _GRID], and (section, block, layer) of each row; outside of blocks all are the module."""
    counts = coverage(plans)
    shapes = plans[0].shapes
    parts = sections({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    blocks = {block: section.name for section in parts for block in section.blocks}
    rows, names = [], []
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        at = (np.arange(_GRID) + 0.5) * shape[0] / _GRID
        rows.append(counts[name].numpy()[at.astype(int)] / len(plans))
        module = name.removesuffix(".weight")
        block = next((block for block in blocks if name.startswith(f"{block}.")), module)
        names.append((blocks.get(block, module), block, module))
    if not rows:
        raise FLError("the global model has no weights with two axes or more to draw", code="unsupported")
    return np.stack(rows), names


def _mark(panel: Axes, names: Sequence[tuple[str, str, str]], named: bool) -> None:
    """Draw lines between blocks and sections, and name rows, or blocks if many."""
    for at, (above, below) in enumerate(pairwise(names), 1):
        if above[:2] != below[:2]:
            panel.axhline(at, color="white", lw=1.8 if above[0] != below[0] else 0.6)
    part = 2 if len(names) <= _NAMED else 1
    places = [list(group) for _, group in groupby(range(len(names)), key=lambda at: names[at][part])]
    ticks = [(group[0] + group[-1] + 1) / 2 for group in places]
    panel.set_yticks(ticks, [names[group[0]][part] if named else "" for group in places], fontsize=7.5)
    panel.xaxis.set_major_formatter(PercentFormatter(100))
    panel.tick_params(axis="x", labelsize=8)
    panel.tick_params(axis="y", length=0)


def leave_coverage(run: RunState) -> None:
    """Write coverage.png, if clients keep a part of the global model.

    If they graft, there is one map without it, too.
    """
    if not run.fed.fleet or not run.algorithm.plan:
        return
    plans = list(map(run.algorithm.plan, range(len(run.fed.fleet))))
    bare = list(map(remove_grafting, plans))
    grafted = {"without grafting": bare, "with grafting": plans}
    maps = grafted if bare != plans else {"clients' models": plans}
    save(coverage_maps(maps, run.config.title()), run.folder / "coverage.png")


def coverage(plans: Sequence[Plan]) -> dict[str, Tensor]:
    """Count the clients that cover each position of each tensor's first axis.

    Args:
        plans: one for each client, all of one global model. If a tensor is written to several places, as in a last
            block, all of them count.

    Returns:
        float64 [S0] for tensors [S0, ...], [1] for scalars, on the CPU. It is the mean over the other axes, so that a
        client with half of the inputs of an output counts as half. No tensor of the global model is made.

    Raises:
        FLError: if there are no plans, or plans of different global models.

    >>> from surgery.plan import Source
    >>> half = Plan({"w": (Source("w", (((0, 2),), ((0, 1),))),)}, {"w": (4, 2)})
    >>> full = Plan({"w": (Source("w", (None, None)),)}, {"w": (4, 2)})
    >>> coverage([half, full])
    {'w': tensor([1.5000, 1.5000, 1.0000, 1.0000], dtype=torch.float64)}
    """
    if not plans:
        raise FLError("there are no plans to count: give at least one")
    if any(plan.fingerprint != plans[0].fingerprint for plan in plans):
        raise FLError("the plans are of different global models: give those of one", code="mismatch")
    shapes = plans[0].shapes
    steps = {name: torch.zeros((shape[0] if shape else 1) + 1, dtype=torch.float64) for name, shape in shapes.items()}
    for plan in plans:
        for source in (source for sources in plan.entries.values() for source in sources):
            shape = shapes[source.name] or (1,)
            first, *others = source.index or (None,)
            sizes = zip(others, shape[1:])
            share = math.prod(1.0 if runs is None else sum(b - a for a, b in runs) / size for runs, size in sizes)
            for start, stop in first if first is not None else ((0, shape[0]),):
                steps[source.name][start] += share
                steps[source.name][stop] -= share
    return {name: step.cumsum(0)[:-1] for name, step in steps.items()}
