"""A report as text of at most 100 columns."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from surgery.inspect.report import Depth, Report, Row, Size
from surgery.names import is_inside
from surgery.width.narrow import Width

_COLUMNS = 100
Cell = tuple[str, str, str, str]  # name (indented), kind, shape before, shape after if it changes; or a line of its own


def describe(report: Report) -> str:
    """The report as text: the tree of layers, the coupled widths, and sizes before and after.

    >>> from torch import nn
    >>> from surgery.inspect.report import inspect
    >>> print(describe(inspect(nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2)), width=0.5, shape=[3])))
    Sequential
    input 3, 50 parameters, 40 MACs, 0.0002 MB of state
    <BLANKLINE>
    layers
      0  Linear  8x3 -> 4x3
      2  Linear  2x8 -> 2x4
    <BLANKLINE>
    coupled widths           tensors
         8 -> 4                    3  0.weight ... 2.weight
    what stays
         3                         1  it is an axis of the input: 0.weight
         2                         2  it is an axis of the output: 2.weight ... 2.bias
    <BLANKLINE>
                     before        after    ratio
    parameters           50           26    52.0%
    MACs                 40           20    50.0%
    state         0.0002 MB    0.0001 MB    52.0%
    """
    kind = f"  {report.kind}" if report.kind != report.model else ""
    shape = "x".join(map(str, report.input))
    sizes = f"{report.before.parameters:,} parameters, {macs(report.before)} MACs, {megabytes(report.before)} of state"
    lines = [f"{report.model}{kind}", f"input {shape}, {sizes}", "", *_tree(report), ""]
    if report.widths:
        lines += [*_widths(report), ""]
    if report.problem:
        lines += [f"note: the model {report.problem}", ""]
    if report.stopped:
        lines += [f"note: stopped for taking too long: {', '.join(report.stopped)}; --seconds sets the limit", ""]
    if report.after:
        lines += _table(report.before, report.after)
    return "\n".join(lines).rstrip()


def macs(size: Size) -> str:
    """The number of multiply-accumulate operations, with a unit.

    >>> macs(Size(1, 4_089_184_256, 4, ""))
    '4.09 G'
    """
    if size.macs is None:
        return "unknown"
    for unit, factor in ((" G", 1e9), (" M", 1e6)):
        if size.macs >= factor:
            return f"{size.macs / factor:.3g}{unit}"
    return f"{size.macs:,}"


def megabytes(size: Size) -> str:
    """The size of the state, in units of 10^6 bytes.

    >>> megabytes(Size(1, None, 102_441_032, ""))
    '102.4 MB'
    """
    value = size.state_bytes / 1e6
    return f"{value:.1f} MB" if value >= 1 else f"{value:.2g} MB"


def depth_text(section: Depth) -> str:
    """`3 -> 2 blocks`, or `3 blocks` if the depth does not change."""
    old = len(section.blocks)
    number = f"{old}" if section.after == old else f"{old} -> {section.after}"
    return f"{number} block{'' if section.after == old == 1 else 's'}"


def main_tensor(row: Row) -> str | None:
    """The tensor that shows what a layer is: its weight. None if it has none; its tensors are listed one by one."""
    return next((name for name in ("weight", "in_proj_weight") if name in row.before.shapes), None)


@dataclass(frozen=True)
class Coupled:
    """Equal widths of several blocks, or a single width. `first` and `last` have `*` instead of the block's number."""

    size: int
    kept: int
    reason: str
    times: int
    tensors: int
    first: str
    last: str


def alike(report: Report) -> list[Coupled]:
    """The widths of a report; those that recur in every block are joined.

    >>> from torch import nn
    >>> from surgery.inspect.report import inspect
    >>> block = lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    >>> for c in alike(inspect(nn.Sequential(nn.Linear(2, 4), block(), block()), shape=[2]))[:3]:
    ...     print(c.size, c.times, c.tensors, c.first, c.last)
    4 1 3 0.weight 1.0.weight
    2 1 1 0.weight 0.weight
    8 2 3 *.0.weight *.2.weight
    """
    blocks = {block for row in report.layers if row.block for block in row.blocks_after()}

    def pattern(width: Width) -> tuple:
        names = list(dict.fromkeys(name for name, _ in width.members))
        block = next((b for b in blocks if is_inside(names[0], b)), None)
        if block and all(is_inside(name, block) for name in names):
            names = [re.sub(r"\d+$", "*", block) + name[len(block) :] for name in names]
        return width.size, width.kept, width.reason, tuple(names)

    patterns = [pattern(width) for width in report.widths]
    order = {p: i for i, p in reversed(list(enumerate(patterns)))}
    return [
        Coupled(size, kept, reason, len(list(same)), len(names), names[0], names[-1])
        for (size, kept, reason, names), same in groupby(sorted(patterns, key=order.__getitem__))
    ]


def _tree(report: Report) -> Iterator[str]:
    """Layers in the order of registration, those of a section under its name; equal blocks are listed once."""
    yield "layers"
    cells: list[Cell] = []
    sections = {section.name: section for section in report.sections}
    for section, rows in groupby(report.layers, key=lambda row: row.section):
        if section is None:
            cells += [cell for row in rows for cell in _cells(row, row.before.name, 1)]
        else:
            one = sections[section]
            cells.append((f"  {one.name or '(the model itself)'}  {depth_text(one)}  {one.kind}", "", "", ""))
            cells += _block_cells([list(block) for _, block in groupby(rows, key=lambda row: row.block)])
    names, kinds, olds = (max((len(cell[i]) for cell in cells if cell[1]), default=0) for i in range(3))
    for name, kind, old, new in cells:
        text = f"{name:{names}}  {kind:{kinds}}  {old:{olds}}{f' -> {new}' if new else ''}" if kind else name
        yield _cut(text.rstrip())


def _block_cells(blocks: Sequence[list[Row]]) -> Iterator[Cell]:
    """The lines of a section's blocks; neighbouring blocks with the same layers and changes are listed once."""

    def inner(row: Row) -> str:
        return row.before.name[len(row.block) + 1 :]

    def look(rows: list[Row]) -> tuple:
        if not any(row.after for row in rows):
            return ("dropped",)
        return tuple((inner(r), r.kind, str(r.before.shapes), str([p.shapes for p in r.after])) for r in rows)

    listed = None
    for what, group in groupby(blocks, key=look):
        same = list(group)
        first, last = (rows[0].block.rpartition(".")[2] for rows in (same[0], same[-1]))
        label = f"    block {first}" if len(same) == 1 else f"    blocks {first}-{last}"
        if what == ("dropped",):
            yield f"{label}  dropped", "", "", ""
            continue
        copies = max(len(row.after) for row in same[0]) - 1
        repeated = f"repeated {copies} more times" if copies > 1 else "repeated once more" if copies else ""
        cells = [cell for row in same[0] for cell in _cells(row, inner(row), 3)]
        remarks = ["like those before" if cells == listed else f"{len(same)} alike" if len(same) > 1 else "", repeated]
        yield "  ".join([label, *filter(None, remarks)]), "", "", ""
        if cells != listed:
            yield from cells
        listed = cells


def _cells(row: Row, name: str, level: int) -> Iterator[Cell]:
    main = main_tensor(row)
    for tensor in [main] if main else row.before.shapes:
        old = "x".join(map(str, row.before.shapes[tensor])) or "scalar"
        new = ("x".join(map(str, row.after[0].shapes[tensor])) or "scalar") if row.after else "dropped"
        label = name if main else f"{name}.{tensor}" if name else tensor
        kind = row.kind if main else "Buffer" if tensor.startswith("running") else "tensor"
        yield "  " * level + label, kind, old, "" if old == new else new


def _widths(report: Report) -> Iterator[str]:
    found = alike(report)
    yield f"{'coupled widths':25}tensors"
    for one in found:
        if not one.reason:
            size = f"{one.size:6} -> {one.kept}" if report.width is not None else f"{one.size:6}"
            times = f"{one.times} x" if one.times > 1 else ""
            yield _cut(f"{size:18}{times:>6}{one.tensors:8}  {_ends(one.first, one.last)}")
    staying = [one for one in found if one.reason]
    yield "what stays"
    for reason in dict.fromkeys(one.reason for one in staying):
        same = [one for one in staying if one.reason == reason]
        sizes = ",".join(map(str, dict.fromkeys(one.size for one in same)))
        tensors = sum(one.tensors * one.times for one in same)
        sizes = f"{sizes:>6}" if len(sizes) <= 22 else f"{sizes[:19]}..."
        yield _cut(f"{sizes:24}{tensors:8}  {reason}: {_ends(same[0].first, same[-1].last)}")


def _ends(first: str, last: str) -> str:
    """The first and the last name; if both are in blocks, the blocks are named once."""
    if first == last:
        return first
    block, star, rest = first.partition("*.")
    if star and last.startswith(block + star):
        return f"{block}*: {rest} ... {last[len(block + star) :]}"
    return f"{first} ... {last}"


def _table(before: Size, after: Size) -> Iterator[str]:
    rows = [
        ("parameters", f"{before.parameters:,}", f"{after.parameters:,}", after.parameters / max(1, before.parameters)),
        ("state", megabytes(before), megabytes(after), after.state_bytes / max(1, before.state_bytes)),
    ]
    if before.macs and after.macs is not None:
        rows.insert(1, ("MACs", macs(before), macs(after), after.macs / before.macs))
    yield f"{'':10}{'before':>13}{'after':>13}{'ratio':>9}"
    for what, old, new, ratio in rows:
        yield f"{what:10}{old:>13}{new:>13}{ratio:>9.1%}"


def _cut(line: str) -> str:
    return line if len(line) <= _COLUMNS else line[: _COLUMNS - 3] + "..."
