"""Names at the ends of lines, which do not overlap."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.transforms import ScaledTranslation

SIZE = 8
"""Points of a name's letters."""
_BESIDE = 0.25  # inches from a line's end to its name: room for a line that leads there
_LINE = 1.35 * SIZE / 72  # inches from one name to the next


class Named(NamedTuple):
    """A line, or an empty one that has nothing to show, and its name."""

    name: str
    line: Line2D


def label_ends(axis: Axes, named: Sequence[Named], height: float) -> None:
    """Write the name of each line right of its last point, at that height or as near as there is room, and connect the
    two. Where the last value is not finite, the name says so: "fesem (nan)".

    Args:
        height: of the axes in inches, at least. The limits of the axes must be final.
    """
    low, high = axis.get_ylim()
    to_share = axis.transScale + axis.transLimits
    points = [_last(axis, line, low, high) for _, line in named]
    shares = [(1.0, 0.0) if point is None else to_share.transform(point) for point in points]
    places = spread([float(high) for _, high in shares], _LINE / height)
    beside = axis.transAxes + ScaledTranslation(_BESIDE, 0, axis.figure.dpi_scale_trans)
    for (name, line), point, (right, _), place in zip(named, points, shares, places):
        values = np.asarray(line.get_ydata(), float)
        text = name if len(values) and np.isfinite(values[-1]) else f"{name} ({values[-1] if len(values) else 'none'})"
        color = tuple(0.75 * part for part in to_rgb(line.get_color()))  # darker, to be read
        look = {"va": "center", "ha": "left", "fontsize": SIZE, "color": color, "annotation_clip": False}
        look["path_effects"] = [withStroke(linewidth=2, foreground="white")]  # of a line that ends early lies on others
        leader = {
            "arrowstyle": "-",
            "relpos": (0, 0.5),
            "color": line.get_color(),
            "lw": 0.7,
            "alpha": 0.6,
            "shrinkA": 0,
            "shrinkB": 1,
        }
        axis.annotate(
            text,
            xy=point or (1, low),
            xytext=(right, place),
            textcoords=beside,
            arrowprops=None if point is None else leader,
            **look,
        )


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Places between 0 and 1 that are a gap apart, in the order of the wanted ones and as near to these as can be. If
    there are too many for the gap they are as far apart as there is room.

    >>> [round(place, 2) for place in spread([0.5, 0.1, 0.52], 0.1)]
    [0.46, 0.1, 0.56]
    >>> spread([1.0, 1.0], 0.25), spread([0, 0, 0], 0.75)
    ([0.75, 1.0], [0.0, 0.5, 1.0])
    """
    gap = min(gap, 1 / max(1, len(wanted) - 1))
    order = sorted(range(len(wanted)), key=lambda at: wanted[at])
    pools: list[list[float]] = []  # of neighbours that touch: places less their number of gaps
    for number, at in enumerate(order):
        pools.append([wanted[at] - number * gap])
        while len(pools) > 1 and np.mean(pools[-2]) >= np.mean(pools[-1]):
            pools[-2:] = [pools[-2] + pools[-1]]
    firsts = [float(np.mean(pool)) for pool in pools for _ in pool]
    top = 1 - (len(wanted) - 1) * gap
    places = {at: min(max(first, 0.0), top) + k * gap for k, (at, first) in enumerate(zip(order, firsts))}
    return [places[at] for at in range(len(wanted))]


def _last(axis: Axes, line: Line2D, low: float, high: float) -> tuple[float, float] | None:
    """The last finite point of a line, moved onto the axis; None if there is none."""
    x, y = (np.asarray(values, float) for values in (line.get_xdata(), line.get_ydata()))
    if line.get_transform() != axis.transData:  # a horizontal one from edge to edge
        x = np.full(len(y), axis.get_xlim()[1])
    finite = np.flatnonzero(np.isfinite(y))
    return (float(x[finite[-1]]), float(np.clip(y[finite[-1]], low, high))) if len(finite) else None
