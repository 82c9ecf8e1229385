"""Which layers share a width with which: a line for each width, a dot at each layer that makes or reads it."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from surgery.inspect.report import Report

_GREY = "#6b7280"


class Shared(NamedTuple):
    """A width that runs through several layers, by their numbers in the picture.

    Attributes:
        size: how many positions it has.
        makes, reads: the layers that have it as their output, and as their input.
        stays: whether it stays whole although others shrink.
    """

    size: int
    makes: tuple[int, ...]
    reads: tuple[int, ...]
    stays: bool

    @property
    def ends(self) -> tuple[int, int]:
        """The first and the last layer."""
        every = (*self.makes, *self.reads)
        return min(every), max(every)


def shared(report: Report, layers: Sequence[str], outputs: Mapping[str, int]) -> list[Shared]:
    """The widths that two or more layers share, the longest first.

    Args:
        layers: the names of the layers in the picture, in the model whose widths the report lists.
        outputs: by layer the axis of its weight that is its output.

    >>> from torch import nn
    >>> from surgery.inspect.report import inspect
    >>> net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    >>> for one in shared(inspect(net, shape=[2]), ["0", "1", "2"], {"0": 0, "1": 0, "2": 0}): print(one)
    Shared(size=4, makes=(0,), reads=(1,), stays=False)
    Shared(size=4, makes=(1,), reads=(2,), stays=False)
    """
    number = {layer: i for i, layer in enumerate(layers)}
    found = []
    for width in report.widths:
        makes, reads = set(), set()
        for tensor, axis in width.members:
            layer, _, name = tensor.rpartition(".")
            if layer in number and name in ("weight", "in_proj_weight"):
                (makes if axis == outputs[layer] else reads).add(number[layer])
        if len(makes | reads) > 1:
            found.append(Shared(width.size, tuple(sorted(makes)), tuple(sorted(reads)), bool(width.reason)))
    return sorted(found, key=lambda one: one.ends[0] - one.ends[1])


def in_rows(found: Sequence[Shared]) -> list[list[Shared]]:
    """The widths in rows in which none lies over another.

    >>> inner, outer = Shared(4, (1,), (2,), False), Shared(8, (0, 2), (1, 3), False)
    >>> [[one.size for one in row] for row in in_rows([outer, inner, Shared(4, (3,), (4,), False)])]
    [[8], [4, 4]]
    """
    result: list[list[Shared]] = []
    for one in found:
        first, last = one.ends
        row = next((row for row in result if all(last < o.ends[0] or first > o.ends[1] for o in row)), None)
        if row is None:
            result.append([one])
        else:
            row.append(one)
    return result


def draw_shared(axes, packed: Sequence[Sequence[Shared]], x: Sequence[float], colours: Sequence[str]) -> None:
    """Draw the rows, from the top: a dot is a layer that makes the width, a ring one that reads it.

    Args:
        x: the place of each layer.
        colours: of each layer.
    """
    for number, row in enumerate(packed):
        for one in row:
            first, last = one.ends
            colour = _GREY if one.stays else colours[one.makes[0] if one.makes else first]
            axes.plot([x[first], x[last]], [-number] * 2, color=colour, lw=1, ls=":" if one.stays else "-", zorder=1)
            style = {"s": 12, "edgecolors": colour, "linewidths": 0.9, "zorder": 2}
            axes.scatter([x[i] for i in one.reads], [-number] * len(one.reads), facecolors="white", **style)
            axes.scatter([x[i] for i in one.makes], [-number] * len(one.makes), facecolors=colour, **style)
    axes.set_ylim(-len(packed) + 0.4, 0.6)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.set_ylabel("one width\n(dot: made,\nring: read)", fontsize=8, rotation=0, ha="right", va="center", color=_GREY)
