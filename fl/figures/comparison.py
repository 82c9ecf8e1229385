"""Runs side by side: a figure, and the table beside it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import get_args

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fl.analysis.costs import check_target
from fl.analysis.groups import AGAINST, along, common, find_runs, group, target_table
from fl.analysis.outcome import table
from fl.base.columns import Due
from fl.base.flags import choice
from fl.base.tables import wrapped
from fl.figures.lines import Line, draw_lines, name_ends, name_lines, parts, styles
from fl.figures.style import check_new, save, shorten, two_wide
from fl.runs.columns import columns
from fl.runs.metrics import Row

_HIGH = 3.1  # inches of a panel
_EMPTY = -1  # a place without a panel


def comparison_figure(
    groups: Mapping[str, Sequence[Sequence[Row]]], title: str, path: Path, along: str = "round"
) -> None:
    """Curves of several methods: mean and one standard deviation over their runs. More than `fl.figures.lines.MOST`
    methods are shared out among panels, in each of which the others are grey.

    Scores on clients' own test data are drawn if all runs have them. A vertical line marks the round in which the first
    run of a method begins to train another level, and the caption says so.

    Args:
        groups: from a label, whose first word is the method, to the rows of each of its runs (one run a seed).
        along: the column that curves are drawn against. If it stays 0, such as the traffic of a method that sends
            nothing, the method is a dashed horizontal line with the value of its selected round, see
            `fl.runs.metrics.selected`.
    """
    lines = [Line(label, runs, label.split()[0]) for label, runs in groups.items()]
    together = parts(lines)
    looks = styles(together)
    keys = panels([set().union(*rows) for line in lines for rows in line.runs])
    rows = _rows(len(keys), len(together))
    figure = Figure(figsize=(max(4.6, 3.8 * len(rows[0])), _HIGH * len(rows)), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
    drawn: dict[str, list[Axes]] = {key: [] for key in keys}
    for number, axis in sorted(figure.subplot_mosaic(rows, empty_sentinel=_EMPTY).items()):
        at, part = divmod(number, len(together))
        behind = [line for line in lines if line not in together[part]]
        draw_lines(axis, keys[at], together[part], looks, behind, along)
        drawn[keys[at]].append(axis)
    for axes in drawn.values():
        name_ends(axes, looks, _HIGH)
    name_lines(figure, lines, looks, along)
    figure.suptitle(shorten(title), fontsize=11)
    save(figure, path)


def _rows(keys: int, parts: int) -> list[list[int]]:
    """The numbers of the panels in each row, key by key and part by part. With several parts every key begins a row.

    >>> _rows(3, 1), _rows(2, 2), _rows(1, 4)
    ([[0, 0], [1, 2]], [[0, 1], [2, 3]], [[0, 1, 2], [3, -1, -1]])
    """
    if parts == 1:
        return two_wide(keys)
    wide = min(3, parts)
    starts = [key * parts + at for key in range(keys) for at in range(0, parts, wide)]
    return [[n if n // parts == start // parts else _EMPTY for n in range(start, start + wide)] for start in starts]


def panels(measured: Sequence[Collection[str]]) -> list[str]:
    """The columns that have curves: those with a label, the global model's first.

    Args:
        measured: the columns that each run has.

    >>> panels([{"accuracy", "loss", "models_cosine", "local_test_accuracy"}])
    ['accuracy', 'local_test_accuracy', 'loss', 'models_cosine']
    """
    labelled = {name: column for name, column in columns().items() if column.label}
    keys = [name for due in get_args(Due) for name, column in labelled.items() if column.due == due]
    own = "local_test_accuracy"
    keys = ["accuracy", own, *(name for name in keys if name not in ("accuracy", own))]  # to compare the two
    left_out = set() if all(own in names for names in measured) else {own}
    if all("perplexity" in names for names in measured):
        left_out.add("loss")  # of which the perplexity is the exponential
    return [key for key in keys if key not in left_out and any(key in names for names in measured)]


def compare(
    folders: Sequence[Path],
    out: Path,
    against: str = "rounds",
    target: float | None = None,
    lay_out: Callable[[Sequence[Sequence[str]]], str] = wrapped,
    new: bool = False,
) -> str:
    """Draw the runs of the folders into one figure, against one of `AGAINST`, and return the table; with a target, a
    second table is below it.

    Args:
        lay_out: makes the text of a table's cells, see `fl.base.tables`.
        new: whether the figure must not be there yet.
    """
    choice("--against", [against], AGAINST)
    if target is not None:
        check_target(target)
    groups = group(find_runs(folders))
    tables = [table(groups, lay_out)] + ([] if target is None else [target_table(groups, target, lay_out)])
    title = common([run.config for runs in groups.values() for run in runs])
    rows = {label: [along(run, against) for run in runs] for label, runs in groups.items()}
    if new:
        check_new(out)
    comparison_figure(rows, title, out, AGAINST[against])
    return "\n\n".join(tables)
