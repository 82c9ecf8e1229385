"""A picture of a report: every layer's width, the kept part, and shared widths."""

from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from surgery.errors import SurgeryError
from surgery.files.whole import check_absent, replacing
from surgery.inspect.describe import macs
from surgery.inspect.report import LayerPlace, LayerRow, Report

_COLOURS = ("#3b6fb6", "#d9822b", "#3a9a6b", "#b5488c", "#7a5cc4", "#b8a02e", "#2f9fb0", "#c14b4b")
_OUTSIDE = "#6b7280"
_ROWS = 24  # of widths that run one over another are drawn at most
_LOOKS: dict[str, dict[str, Any]] = {
    "kept": {},
    "cut away": {"alpha": 0.22},
    "block dropped": {"fill": False, "hatch": "////", "alpha": 0.55, "lw": 0.8},
    "block added": {"hatch": "....", "edgecolor": "white"},
}


class LayerBar(NamedTuple):
    """A layer in the picture: its name, and its width before and after (0 for none)."""

    section: str | None
    block: str
    layer: str
    before: int
    after: int
    name: str = ""


class Coupled(NamedTuple):
    """A width of several layers, by numbers in the picture: its makers and readers.

    `stays` tells whether it keeps its size although others shrink.
    """

    size: int
    makes: tuple[int, ...]
    reads: tuple[int, ...]
    stays: bool

    @property
    def ends(self) -> tuple[int, int]:
        """The first and the last layer."""
        return min(*self.makes, *self.reads), max(*self.makes, *self.reads)


def draw(report: Report, path: str | Path) -> None:
    """Draw a report: for each layer with a matrix a bar as high as its output is wide.

    The solid part is what is kept.

    Above the bars, a line joins the layers that share a width, which therefore shrink together.

    Args:
        path: a new .png, .svg or .pdf file.

    >>> import tempfile; from torch import nn; from surgery.inspect.report import report_of
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     draw(report_of(nn.Linear(2, 3), shape=[2]), Path(folder, "linear.png"))
    """
    path, kind = Path(path), check_picture(Path(path))
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise SurgeryError("matplotlib is not installed: pip install matplotlib", code="missing") from None
    columns = bars(report)
    if not columns:
        raise SurgeryError(f"{report.model} has no layer with a matrix to draw", code="unsupported")
    axis = {row.before.name: _output_axis(row) for row in report.layers}
    packed = in_rows(
        list_coupled(report, [bar.name for bar in columns], {bar.name: axis[bar.layer] for bar in columns})
    )[:_ROWS]
    heights = [0.12 + 0.13 * len(packed), 5.2]
    figure = Figure(figsize=(min(18, max(9, 2.5 + 0.17 * len(columns))), sum(heights)), layout="constrained")
    above, axes = figure.subplots(2, sharex=True, height_ratios=heights)
    section_colours = {section.name: _COLOURS[i % len(_COLOURS)] for i, section in enumerate(report.sections)}
    colours = [
        section_colours.get(bar.section or "", _OUTSIDE) if bar.section is not None else _OUTSIDE for bar in columns
    ]
    x, looks = positions(columns), {}
    for at, bar, colour in zip(x, columns, colours):
        look = "block dropped" if not bar.after else "cut away" if bar.after < bar.before else "kept"
        parts = [(look, max(bar.before, bar.after)), ("kept" if bar.before else "block added", bar.after)]
        for name, height in parts[bar.before == bar.after :] if bar.after else parts[:1]:
            looks[name] = Patch(label=name, **{"facecolor": _OUTSIDE, "edgecolor": _OUTSIDE, **_LOOKS[name]})
            axes.bar(at, height, width=0.86, **{"facecolor": colour, "edgecolor": colour, "lw": 0, **_LOOKS[name]})
    axes.set_yscale("log", base=2)
    axes.set_ylim(min(min(b.before or b.after, b.after or b.before) for b in columns) / 2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_ylabel("output width (log scale)")
    axes.set_xlim(x[0] - 1, x[-1] + 1)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.grid(axis="y", color="#d8dbe0", lw=0.7)
    axes.set_axisbelow(True)
    for name, group in groupby(zip(x, columns, colours), key=lambda item: item[1].section):
        places = list(group)
        _label(axes, report, name, [at for at, _, _ in places], [bar for _, bar, _ in places], places[0][2])
    _draw_coupled(above, packed, x, colours)
    above.set_title(_title(report), loc="left", fontsize=11, linespacing=1.5)
    for panel in (above, axes):
        panel.spines[["top", "right", "left"] + ["bottom"] * (panel is above)].set_visible(False)
    if len(looks) > 1:
        figure.legend(
            handles=[*looks.values()], loc="outside lower center", ncols=len(looks), frameon=False, fontsize=9
        )
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format=kind)


def check_picture(path: Path) -> str:
    """Return a picture's format by its path; SurgeryError if unknown or taken.

    >>> check_picture(Path("model.svg"))
    'svg'
    """
    kind = path.suffix.lstrip(".").lower()
    if kind not in ("png", "svg", "pdf"):
        raise SurgeryError(f"{path}: pictures can be saved as .png, .svg, .pdf", code="file")
    check_absent(path)
    return kind


def bars(report: Report) -> list[LayerBar]:
    """List layers with matrices in order; copies of a block follow the original."""
    result = []
    for block, layers in groupby(report.layers, key=lambda row: row.block or ""):
        rows = [row for row in layers if row.weight and len(row.before.shapes[row.weight]) > 1]
        for copy in range(max((len(row.after) for row in rows), default=0) or 1):
            for row in rows:
                place = row.after[copy] if copy < len(row.after) else None
                after, name = (_width(row, place), place.name) if place else (0, "")
                before = 0 if copy else _width(row, row.before)
                result.append(LayerBar(row.section, f"{block}+{copy}", row.before.name, before, after, name))
    return result


def positions(columns: Sequence[LayerBar]) -> list[float]:
    """Place bars, with a gap between blocks and a larger one between sections.

    >>> names = ("a.0", "a.0.x"), ("a.0", "a.0.y"), ("a.1", "a.1.x")
    >>> positions([LayerBar("a", block, name, 1, 1) for block, name in names])
    [0.0, 1.0, 2.5]
    """
    x = [0.0]
    for last, bar in pairwise(columns):
        x.append(x[-1] + (2.3 if last.section != bar.section else 1.5 if last.block != bar.block else 1))
    return x


def _width(row: LayerRow, place: LayerPlace) -> int:
    return place.shapes[row.weight or ""][_output_axis(row)]


def _output_axis(row: LayerRow) -> int:
    """Return the axis of a layer's weight that is its output."""
    return 1 if row.kind == "Embedding" or "ConvTranspose" in row.kind else 0


def _label(axes: Any, report: Report, name: str | None, x: list[float], layers: list[LayerBar], colour: str) -> None:
    """Label a section with its name and depth, or other layers with their names."""
    text = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top", "color": colour}
    if name is None:
        for at, bar in zip(x, layers):
            axes.text(at, -0.025, ".".join(bar.layer.split(".")[-2:]), rotation=90, fontsize=7.5, **text)
        return
    depth = next(section for section in report.sections if section.name == name)
    line = {"color": colour, "lw": 3, "solid_capstyle": "butt", "clip_on": False}
    axes.plot([x[0] - 0.43, x[-1] + 0.43], [-0.025] * 2, transform=axes.get_xaxis_transform(), **line)
    words, narrow = [name, str(depth).replace("->", "→")], len(x) < 5
    style = {"rotation": 90, "fontsize": 7.5} if narrow else {"fontsize": 9}
    axes.text((x[0] + x[-1]) / 2, -0.05, (", " if narrow else "\n").join(words), **style, **text)


def _title(report: Report) -> str:
    before, after = report.before, report.after
    if not after:
        return f"{report.model}\n{before.parameters:,} parameters, {macs(before)} MACs"
    parts = [report.model] + ([f"width {report.width:g}"] if report.width is not None else [])
    if any(section.after != len(section.blocks) for section in report.sections):
        parts.append("depth " + ", ".join(str(section.after) for section in report.sections))
    ratio = f"({after.parameters / max(1, before.parameters):.0%})"
    work = f"{macs(before)} → {macs(after)} MACs"
    if before.macs and after.macs is not None:
        work += f" ({after.macs / before.macs:.0%})"
    sizes = f"{before.parameters / 1e6:.2f} M → {after.parameters / 1e6:.2f} M parameters {ratio}"
    return f"{', '.join(parts)}\n{sizes}, {work}"


def list_coupled(report: Report, layers: Sequence[str], outputs: Mapping[str, int]) -> list[Coupled]:
    """List the widths that two or more layers share, the longest first.

    Args:
        layers: the names of the layers in the picture, in the model whose widths the report lists.
        outputs: by layer the axis of its weight that is its output.

    >>> from torch import nn
    >>> from surgery.inspect.report import report_of
    >>> net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 1))
    >>> for link in list_coupled(report_of(net, shape=[2]), ["0", "1", "2"], {"0": 0, "1": 0, "2": 0}): print(link)
    Coupled(size=4, makes=(0,), reads=(1,), stays=False)
    Coupled(size=4, makes=(1,), reads=(2,), stays=False)
    """
    number = {layer: i for i, layer in enumerate(layers)}
    links = []
    for width in report.widths:
        makes, reads = set(), set()
        for tensor, axis in width.members:
            layer, _, name = tensor.rpartition(".")
            if layer in number and name in ("weight", "in_proj_weight"):
                (makes if axis == outputs[layer] else reads).add(number[layer])
        if len(makes | reads) > 1:
            links.append(Coupled(width.size, tuple(sorted(makes)), tuple(sorted(reads)), bool(width.reason)))
    return sorted(links, key=lambda link: link.ends[0] - link.ends[1])


def in_rows(links: Sequence[Coupled]) -> list[list[Coupled]]:
    """Pack the widths into rows in which none lies over another.

    >>> inner, outer = Coupled(4, (1,), (2,), False), Coupled(8, (0, 2), (1, 3), False)
    >>> [[link.size for link in row] for row in in_rows([outer, inner, Coupled(4, (3,), (4,), False)])]
    [[8], [4, 4]]
    """
    result: list[list[Coupled]] = []
    for link in links:
        first, last = link.ends
        row = next((row for row in result if all(last < o.ends[0] or first > o.ends[1] for o in row)), None)
        if row is None:
            result.append([link])
        else:
            row.append(link)
    return result


def _draw_coupled(axes: Any, packed: Sequence[Sequence[Coupled]], x: Sequence[float], colours: Sequence[str]) -> None:
    """Draw rows from the top: a dot makes the width, a ring reads it."""
    for number, row in enumerate(packed):
        for link in row:
            first, last = link.ends
            colour = _OUTSIDE if link.stays else colours[link.makes[0] if link.makes else first]
            axes.plot([x[first], x[last]], [-number] * 2, color=colour, lw=1, ls=":" if link.stays else "-", zorder=1)
            for layers, inside in ((link.reads, "white"), (link.makes, colour)):
                style = {"s": 12, "edgecolors": colour, "linewidths": 0.9, "zorder": 2, "facecolors": inside}
                axes.scatter([x[i] for i in layers], [-number] * len(layers), **style)
    axes.set_ylim(-len(packed) + 0.4, 0.6)
    axes.set_yticks([])
    text = "one width\n(dot: made,\nring: read)" if packed else ""
    axes.set_ylabel(text, fontsize=8, rotation=0, ha="right", va="center", color=_OUTSIDE)
