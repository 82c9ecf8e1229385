"""How far the y axis of curves reaches."""

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from fl.base.columns import Column

_EDGE = 0.02  # share of the axis beyond the least and largest possible value, so that lines there are seen
_RELATIVE = 0.01  # an axis spans at least this share of its values
_FEW = 30  # a logarithmic axis whose ends differ by a smaller factor has ticks between powers of ten


def settle(axis: Axes, column: Column) -> None:
    """Set the ends of the y axis once all curves are drawn: at least `column.span` apart, and not far beyond the
    values that the column can have. An axis without a finite value says so.

    >>> from matplotlib.figure import Figure
    >>> axis = Figure().subplots()
    >>> _ = axis.plot([1, 2], [0.9991, 0.9993])
    >>> settle(axis, Column(factor=100))
    >>> [round(float(end), 4) for end in axis.get_ylim()]
    [0.9804, 1.0004]
    """
    if column.log:
        axis.set_yscale("log")
    if not any(np.isfinite(line.get_ydata()).any() for line in axis.lines):
        axis.text(0.5, 0.5, "no finite value", transform=axis.transAxes, ha="center", color="0.4")
        axis.set_yticks([])
        return
    low, high = axis.get_ylim()
    if column.log:
        low, high = (math.log(end) for end in (low, high))
        bottom, top = (math.log(end) if end > 0 else -math.inf for end in column.ends)
        low, high = within(low, high, math.log1p(column.span), bottom, top)
        axis.set_ylim(math.exp(low), math.exp(high))
        _plain_numbers(axis)
    else:
        axis.set_ylim(within(low, high, max(column.span, _RELATIVE * max(abs(low), abs(high))), *column.ends))


def within(low: float, high: float, span: float, bottom: float, top: float) -> tuple[float, float]:
    """The ends of an axis, at least `span` apart and hardly beyond `bottom` and `top`.

    >>> [round(end, 3) for end in within(0.4, 0.402, 0.02, 0, 1)]
    [0.391, 0.411]
    >>> [round(end, 3) for end in within(-0.4, 0.5, 0.02, 0, 1)]
    [-0.018, 0.5]
    """
    edge = _EDGE * max(span, high - low)
    bottom, top = bottom - edge, top + edge
    low, high = max(low, bottom), min(high, top)
    missing = max(0.0, span - (high - low))
    low, high = low - missing / 2, high + missing / 2
    shift = max(0.0, bottom - low) - max(0.0, high - top)
    return low + shift, high + shift


def _plain_numbers(axis: Axes) -> None:
    """Ticks of a logarithmic axis as plain numbers, with some between the powers of ten if the axis spans few."""
    low, high = axis.get_ylim()
    plain = FuncFormatter(lambda value, _: f"{value:g}")
    if high / low < 2:  # as good as linear
        axis.yaxis.set_major_locator(MaxNLocator(nbins=5))
    elif high / low < _FEW:
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(plain)
    axis.yaxis.set_minor_formatter(NullFormatter())
    if high / low < _FEW:
        axis.yaxis.set_minor_locator(NullLocator())
