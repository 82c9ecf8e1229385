"""A picture of a report: the width of every layer, and how much of it is kept."""

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from math import log2
from pathlib import Path
from typing import Any, NamedTuple

from surgery.errors import SurgeryError
from surgery.files.whole import check_absent, replacing
from surgery.inspect.describe import depth_text, macs, main_tensor
from surgery.inspect.report import Place, Report, Row

_COLOURS = ("#3b6fb6", "#d9822b", "#3a9a6b", "#b5488c", "#7a5cc4", "#b8a02e", "#2f9fb0", "#c14b4b")
_OUTSIDE = "#6b7280"
_DROPPED: dict[str, Any] = {"fill": False, "hatch": "////", "alpha": 0.55}
_ADDED: dict[str, Any] = {"hatch": "....", "edgecolor": "white"}
_SUFFIXES = ("png", "svg", "pdf")
_ROWS = 24  # of widths that run one over another are drawn at most


class Bar(NamedTuple):
    """A layer in the picture: its width before (0 if it is new) and after (0 if it is dropped)."""

    section: str | None
    block: str
    layer: str
    before: int
    after: int
    name: str = ""  # after; "" if it is dropped


class Coupled(NamedTuple):
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


def draw(report: Report, path: str | Path) -> None:
    """Draw a report: for each layer with a matrix a bar as high as its output is wide. The solid part is what is kept.

    Above the bars, a line joins the layers that share a width, which therefore shrink together.

    Args:
        path: a new .png, .svg or .pdf file.

    >>> import tempfile; from torch import nn; from surgery.inspect.report import inspect
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw(inspect(nn.Linear(2, 3), shape=[2]), Path(folder, "linear.png"))
    """
    path, kind = Path(path), check_picture(Path(path))
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise SurgeryError("matplotlib is not installed: pip install matplotlib") from None
    found = bars(report)
    if not found:
        raise SurgeryError(f"{report.model} has no layer with a matrix, so there is nothing to draw")
    kinds = {bar.name: _output_axis(row) for row in report.layers for bar in found if bar.layer == row.before.name}
    packed = in_rows(coupled(report, [bar.name for bar in found], kinds))[:_ROWS]
    heights = [0.12 + 0.13 * len(packed), 5.2]
    size = (min(18, max(9, 2.5 + 0.17 * len(found))), sum(heights) if packed else heights[1])
    figure = Figure(figsize=size, layout="constrained")
    above, axes = figure.subplots(2, sharex=True, height_ratios=heights) if packed else (None, figure.subplots())
    colours = {section.name: _COLOURS[i % len(_COLOURS)] for i, section in enumerate(report.sections)}
    top = max(max(bar.before, bar.after) for bar in found)
    low = 2 ** int(log2(max(1, min(min(b.before or top, b.after or top) for b in found)))) / 2
    x = positions(found)
    for at, bar in zip(x, found):
        colour = colours.get(bar.section, _OUTSIDE)
        box: dict[str, Any] = {"width": 0.86, "bottom": low, "lw": 0}
        if bar.before and not bar.after:
            axes.bar(at, bar.before - low, edgecolor=colour, **{**box, "lw": 0.8}, **_DROPPED)
        elif bar.before:
            axes.bar(at, bar.before - low, facecolor=colour, alpha=0.22, **box)
        if bar.after:
            axes.bar(at, bar.after - low, facecolor=colour, **box, **({} if bar.before else _ADDED))
    axes.set_yscale("log", base=2)
    axes.set_ylim(low, top * 1.25)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel("output width (log scale)")
    axes.set_xlim(x[0] - 1, x[-1] + 1)
    axes.set_xticks([])
    axes.grid(axis="y", color="#d8dbe0", lw=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(length=0, colors="#4b5563")
    _label(axes, report, found, x, colours)
    cut = any(bar.before > bar.after > 0 for bar in found)
    legend: list[tuple[bool, dict[str, Any]]] = [
        (cut, {"label": "kept", "facecolor": _OUTSIDE}),
        (cut, {"label": "cut away", "facecolor": _OUTSIDE, "alpha": 0.22}),
        (any(not b.after for b in found), {"label": "block dropped", "edgecolor": _OUTSIDE, **_DROPPED}),
        (any(not b.before for b in found), {"label": "block added", "facecolor": _OUTSIDE, **_ADDED}),
    ]
    handles = [Patch(**style) for shown, style in legend if shown]
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
    if packed:
        _draw_coupled(above, packed, x, [colours.get(bar.section, _OUTSIDE) for bar in found])
    (above or axes).set_title(_title(report), loc="left", fontsize=11, color="#111827", linespacing=1.5)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format=kind)


def check_picture(path: Path) -> str:
    """The format of a picture by its path; SurgeryError if there is no such format, or something is at the path.

    >>> check_picture(Path("model.svg"))
    'svg'
    """
    kind = path.suffix.lstrip(".").lower()
    if kind not in _SUFFIXES:
        raise SurgeryError(f"{path}: pictures can be saved as {', '.join('.' + s for s in _SUFFIXES)}")
    check_absent(path)
    return kind


def bars(report: Report) -> list[Bar]:
    """The layers with matrices, in order; copies of a block follow the block that they repeat."""
    result = []
    for block, layers in groupby(report.layers, key=lambda row: row.block or ""):
        rows = [row for row in layers if (name := main_tensor(row)) and len(row.before.shapes[name]) > 1]
        for copy in range(max((len(row.after) for row in rows), default=0) or 1):
            for row in rows:
                place = row.after[copy] if copy < len(row.after) else None
                after, name = (_width(row, place), place.name) if place else (0, "")
                before = 0 if copy else _width(row, row.before)
                result.append(Bar(row.section, f"{block}+{copy}", row.before.name, before, after, name))
    return result


def positions(found: list[Bar]) -> list[float]:
    """The positions of bars, with a gap between blocks and a larger one between sections.

    >>> positions([Bar("a", "a.0", "a.0.x", 1, 1), Bar("a", "a.0", "a.0.y", 1, 1), Bar("a", "a.1", "a.1.x", 1, 1)])
    [0.0, 1.0, 2.5]
    """
    x = [0.0]
    for last, bar in pairwise(found):
        gap = 1.3 if last.section != bar.section else 0.5 if last.block != bar.block else 0.0
        x.append(x[-1] + 1 + gap)
    return x


def _width(row: Row, place: Place) -> int:
    return place.shapes[main_tensor(row)][_output_axis(row)]


def _output_axis(row: Row) -> int:
    """The axis of a layer's weight that is its output."""
    return 1 if row.kind == "Embedding" or "ConvTranspose" in row.kind else 0


def _label(axes, report: Report, found: list[Bar], x: list[float], colours: dict[str, str]) -> None:
    """Label sections with names and depths, and layers outside of sections with names."""
    below = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top", "fontsize": 9}
    outside = [(at, bar) for at, bar in zip(x, found) if bar.section is None]
    for at, bar in outside if len(outside) <= 30 else ():
        axes.text(at, -0.025, _short(bar.layer), rotation=90, color=_OUTSIDE, **{**below, "fontsize": 7.5})
    for section in report.sections:
        mine = [at for at, bar in zip(x, found) if bar.section == section.name]
        if not mine:
            continue
        colour = colours[section.name]
        ends = [mine[0] - 0.43, mine[-1] + 0.43]
        line = {"color": colour, "lw": 3, "solid_capstyle": "butt", "clip_on": False}
        axes.plot(ends, [-0.025] * 2, transform=axes.get_xaxis_transform(), **line)
        texts = [section.name, depth_text(section).replace("->", "→")]
        room = (mine[-1] - mine[0] + 2) / (x[-1] - x[0] + 2) * axes.figure.get_figwidth() * 72
        if max(map(len, texts)) * 5.2 < room:  # points
            axes.text(sum(ends) / 2, -0.05, "\n".join(texts), color=colour, **below)
        else:
            style = {**below, "fontsize": 7.5, "rotation": 90}
            axes.text(sum(ends) / 2, -0.05, ", ".join(texts), color=colour, **style)


def _short(layer: str) -> str:
    """The end of a name: the last two components, or more if the first of these is a number."""
    parts = layer.split(".")
    start = next((i for i in range(max(0, len(parts) - 2), -1, -1) if not parts[i].isdigit()), 0)
    return ".".join(parts[start:])


def _title(report: Report) -> str:
    before, after = report.before, report.after
    if not after:
        return f"{report.model}\n{before.parameters:,} parameters, {macs(before)} MACs"
    what = [f"width {report.width:g}"] if report.width is not None else []
    if any(section.after != len(section.blocks) for section in report.sections):
        what.append("depth " + ", ".join(str(section.after) for section in report.sections))
    ratio = f"({after.parameters / max(1, before.parameters):.0%})"
    work = f"{macs(before)} → {macs(after)} MACs"
    if before.macs and after.macs is not None:
        work += f" ({after.macs / before.macs:.0%})"
    sizes = f"{before.parameters / 1e6:.2f} M → {after.parameters / 1e6:.2f} M parameters {ratio}, {work}"
    return f"{report.model}, {', '.join(what)}\n{sizes}" if what else f"{report.model}\n{sizes}"


def coupled(report: Report, layers: Sequence[str], outputs: Mapping[str, int]) -> list[Coupled]:
    """The widths that two or more layers share, the longest first.

    Args:
        layers: the names of the layers in the picture, in the model whose widths the report lists.
        outputs: by layer the axis of its weight that is its output.

    >>> from torch import nn
    >>> from surgery.inspect.report import inspect
    >>> net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    >>> for one in coupled(inspect(net, shape=[2]), ["0", "1", "2"], {"0": 0, "1": 0, "2": 0}): print(one)
    Coupled(size=4, makes=(0,), reads=(1,), stays=False)
    Coupled(size=4, makes=(1,), reads=(2,), stays=False)
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
            found.append(Coupled(width.size, tuple(sorted(makes)), tuple(sorted(reads)), bool(width.reason)))
    return sorted(found, key=lambda one: one.ends[0] - one.ends[1])


def in_rows(found: Sequence[Coupled]) -> list[list[Coupled]]:
    """The widths in rows in which none lies over another.

    >>> inner, outer = Coupled(4, (1,), (2,), False), Coupled(8, (0, 2), (1, 3), False)
    >>> [[one.size for one in row] for row in in_rows([outer, inner, Coupled(4, (3,), (4,), False)])]
    [[8], [4, 4]]
    """
    result: list[list[Coupled]] = []
    for one in found:
        first, last = one.ends
        row = next((row for row in result if all(last < o.ends[0] or first > o.ends[1] for o in row)), None)
        if row is None:
            result.append([one])
        else:
            row.append(one)
    return result


def _draw_coupled(axes, packed: Sequence[Sequence[Coupled]], x: Sequence[float], colours: Sequence[str]) -> None:
    """Draw the rows, from the top: a dot is a layer that makes the width, a ring one that reads it.

    Args:
        x: the place of each layer.
        colours: of each layer.
    """
    for number, row in enumerate(packed):
        for one in row:
            first, last = one.ends
            colour = _OUTSIDE if one.stays else colours[one.makes[0] if one.makes else first]
            axes.plot([x[first], x[last]], [-number] * 2, color=colour, lw=1, ls=":" if one.stays else "-", zorder=1)
            style = {"s": 12, "edgecolors": colour, "linewidths": 0.9, "zorder": 2}
            axes.scatter([x[i] for i in one.reads], [-number] * len(one.reads), facecolors="white", **style)
            axes.scatter([x[i] for i in one.makes], [-number] * len(one.makes), facecolors=colour, **style)
    axes.set_ylim(-len(packed) + 0.4, 0.6)
    axes.set_yticks([])
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.set_ylabel(
        "one width\n(dot: made,\nring: read)", fontsize=8, rotation=0, ha="right", va="center", color=_OUTSIDE
    )
