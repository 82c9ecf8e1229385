"""A report as text of at most 100 columns, fewer where a terminal has fewer."""

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from surgery.inspect.report import LayerRow, ModelSize, Report
from surgery.width.narrow import Width

_COLUMNS = 100


def describe(report: Report) -> str:
    """Describe a report: the tree of layers, coupled widths, sizes before and after.

    >>> from torch import nn
    >>> from surgery.inspect.report import report_of
    >>> print(describe(report_of(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), width=0.5, shape=[3])))
    Sequential
    input 3, 50 parameters, 40 MACs, 0.0002 MB of state
    <BLANKLINE>
    layers
      0  Linear  8x3 -> 4x3
      2  Linear  2x8 -> 2x4
    <BLANKLINE>
    coupled widths           tensors  name
         8 -> 4                    3  0.weight:0
    what stays
         3                         1  it is an axis of the input: 0.weight
         2                         2  it is an axis of the output: 2.weight
    <BLANKLINE>
                     before        after    ratio
    parameters           50           26    52.0%
    MACs                 40           20    50.0%
    state         0.0002 MB    0.0001 MB    52.0%
    """
    kind = f"  {report.kind}" if report.kind != report.model else ""
    shape, size = "x".join(map(str, report.input)), report.before
    sizes = f"{size.parameters:,} parameters, {macs(size)} MACs, {megabytes(size)} of state"
    titles = {s.name: f"{s.name or '(the model itself)'}  {s}  {s.kind}" for s in report.sections}
    lines = [f"{report.model}{kind}", f"input {shape}, {sizes}", "", "layers", *tree(_lines(report.layers), titles)]
    if report.widths:
        lines += ["", *widths_table(report.widths)]
    if report.problem:
        lines += ["", f"note: the model {report.problem}"]
    if report.stopped:
        lines += ["", f"note: stopped for taking too long: {', '.join(report.stopped)}; --seconds sets the limit"]
    if report.after:
        lines += ["", *_table(report.before, report.after)]
    return "\n".join(lines)


def macs(size: ModelSize) -> str:
    """Write the number of multiply-accumulates with a unit.

    >>> macs(ModelSize(1, 4_089_184_256, 4, ""))
    '4.09 G'
    """
    if size.macs is None:
        return "unknown"
    unit, factor = next(((u, f) for u, f in ((" G", 1e9), (" M", 1e6)) if size.macs >= f), ("", 1))
    return f"{size.macs / factor:.3g}{unit}" if unit else f"{size.macs:,}"


def megabytes(size: ModelSize) -> str:
    """Write the size of the state in units of 10^6 bytes.

    >>> megabytes(ModelSize(1, None, 102_441_032, ""))
    '102.4 MB'
    """
    value = size.state_bytes / 1e6
    return f"{value:.1f} MB" if value >= 1 else f"{value:.2g} MB"


class TreeLine(NamedTuple):
    """A layer in a tree: its place, its description, and its block's description."""

    section: str | None
    block: str | None
    name: str
    text: str
    remark: str = ""


def tree(lines: Iterable[TreeLine], titles: Mapping[str, str]) -> Iterator[str]:
    """List layers in order, a section's under its title; runs of equal blocks once."""
    for section, inside in groupby(lines, key=lambda line: line.section):
        if section is None:
            yield from _cut(f"  {line.name or '(the model itself)'}  {line.text}" for line in _pad(list(inside)))
            continue
        yield f"  {titles[section]}"
        blocks = [list(block) for _, block in groupby(inside, key=lambda line: line.block)]
        for _, group in groupby(blocks, key=lambda block: [(*_inner(line), line.remark) for line in block]):
            same = list(group)
            first, last = (block[0].block.rpartition(".")[2] for block in (same[0], same[-1]))
            label = f"block {first}" if len(same) == 1 else f"blocks {first}-{last}"
            yield "  ".join(filter(None, [f"    {label}", f"{len(same)} alike" * (len(same) > 1), same[0][0].remark]))
            if same[0][0].remark != "dropped":
                inner = [line._replace(name=_inner(line)[0]) for line in same[0]]
                yield from _cut(f"      {line.name}  {line.text}" for line in _pad(inner))


def _inner(line: TreeLine) -> tuple[str, str]:
    return line.name[len(line.block or "") :].removeprefix("."), line.text


def _pad(lines: Sequence[TreeLine]) -> list[TreeLine]:
    wide = max(len(line.name) for line in lines)
    return [line._replace(name=f"{line.name:{wide}}") for line in lines]


def _lines(rows: Sequence[LayerRow]) -> Iterator[TreeLine]:
    for row in rows:
        copies = len(row.after) - 1
        remark = (
            "dropped" if not row.after else "" if not copies else f"repeated {copies} more time{'s' * (copies > 1)}"
        )
        for tensor in [row.weight] if row.weight else row.before.shapes:
            old, new = (_shape(place.shapes[tensor]) for place in (row.before, (*row.after, row.before)[0]))
            kind = row.kind if row.weight else "Buffer" if tensor.startswith("running") else "tensor"
            name = row.before.name if row.weight else f"{row.before.name}.{tensor}".removeprefix(".")
            text = f"{kind}  {old}{f' -> {new}' if new != old else ''}{' -> dropped' * (not row.after)}"
            yield TreeLine(row.section, row.block, name, text, remark)


def _shape(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "scalar"


def widths_table(widths: Sequence[Width]) -> Iterator[str]:
    """List widths by names that `permute` takes; once where only block numbers differ."""
    yield f"{'coupled widths':25}tensors  name"
    alike: dict[tuple, list[Width]] = {}
    for width in widths:
        alike.setdefault((width.size, width.kept, width.reason, *map(_star, _tensors(width))), []).append(width)
    for (size, left, reason, *tensors), same in alike.items():
        if not reason:
            sizes, times = f"{size:6}{f' -> {left}' if left != size else ''}", f"{len(same)} x" if len(same) > 1 else ""
            name = _star(same[0].name) if len(same) > 1 else same[0].name
            yield from _cut([f"{sizes:18}{times:>6}{len(tensors):8}  {name}"])
    staying = [width for width in widths if width.reason]
    yield from ["what stays"] * bool(staying)
    for reason in dict.fromkeys(width.reason for width in staying):
        same = [width for width in staying if width.reason == reason]
        sizes = f"{','.join(dict.fromkeys(str(width.size) for width in same)):>6}"
        count = sum(len(_tensors(width)) for width in same)
        line = f"{sizes if len(sizes) < 24 else f'{sizes[:20]}...':24}{count:8}  {reason}: {_tensors(same[0])[0]}"
        yield from _cut(textwrap.wrap(line, _columns(), subsequent_indent=" " * 34, break_on_hyphens=False))


def _tensors(width: Width) -> list[str]:
    return list(dict.fromkeys(name for name, _ in width.members))


def _star(name: str) -> str:
    """Write `*` for the first number of a name.

    >>> _star("blocks.3.attn.0.weight:0")
    'blocks.*.attn.0.weight:0'
    """
    return re.sub(r"(?<![^.])\d+(?=\.)", "*", name, count=1)


def _table(before: ModelSize, after: ModelSize) -> Iterator[str]:
    rows = [
        ("parameters", f"{before.parameters:,}", f"{after.parameters:,}", after.parameters / max(1, before.parameters)),
        ("state", megabytes(before), megabytes(after), after.state_bytes / max(1, before.state_bytes)),
    ]
    if before.macs and after.macs is not None:
        rows.insert(1, ("MACs", macs(before), macs(after), after.macs / before.macs))
    yield f"{'':10}{'before':>13}{'after':>13}{'ratio':>9}"
    for label, old, new, ratio in rows:
        yield f"{label:10}{old:>13}{new:>13}{ratio:>9.1%}"


def _columns() -> int:
    return min(_COLUMNS, max(60, shutil.get_terminal_size().columns)) if sys.stdout.isatty() else _COLUMNS


def _cut(lines: Iterable[str]) -> Iterator[str]:
    most = _columns()
    yield from (line if len(line) <= most else line[: most - 3] + "..." for line in map(str.rstrip, lines))
