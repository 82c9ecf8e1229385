"""Compare runs in one figure and one table: `python -m fl.compare FOLDER... [--out FILE]`.

`--against rounds|traffic|macs|seconds|simulated` says what curves are drawn against, and `--target 0.7` what costs are
counted up to.

Runs that differ in their seed alone are one line: mean and standard deviation over seeds.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fl.analysis.groups import AGAINST, along, common, find_runs, group, selection, table, target_table
from fl.base.console import guarded
from fl.base.settings import choice
from fl.base.tables import fitted, wrapped
from fl.settings.help import command


@dataclass(frozen=True)
class Arguments:
    """Draw runs in one figure (mean and standard deviation over seeds) and print a table."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """run folders, or folders that hold some"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("comparison.png")
    """the figure; must be new"""
    against: Annotated[str, tyro.conf.arg(metavar="|".join(AGAINST))] = "rounds"
    """what curves are drawn against: rounds, what a client sent and received (traffic), the multiply-accumulates of all
    clients' forward passes in training (macs; a step costs about three times as many), seconds of training, or those of
    --pace (simulated)"""
    target: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """a test accuracy in (0, 1], or a perplexity above 1: what runs took to reach it is a second table"""


def compare(
    folders: Sequence[Path],
    out: Path,
    against: str = "rounds",
    target: float | None = None,
    lay_out: Callable[[Sequence[Sequence[str]]], str] = wrapped,
    new: bool = False,
) -> str:
    """Draw the runs of the folders into one figure, against one of `AGAINST`, and return the table.

    With a target, a second table is below it.

    Args:
        lay_out: makes the text of a table's cells, see `fl.base.tables`.
        new: whether the figure must not be there yet.
    """
    from fl.figures.curves import comparison_figure
    from fl.figures.style import check_new

    choice("--against", [against], AGAINST)
    groups = group(find_runs(folders))
    tables = [table(groups, lay_out)] + ([] if target is None else [target_table(groups, target, lay_out)])
    title = common([run.config for runs in groups.values() for run in runs])
    rows = {label: [along(run, against) for run in runs] for label, runs in groups.items()}
    if new:
        check_new(out)
    chosen = {label: [selection(run) for run in runs] for label, runs in groups.items()}
    comparison_figure(rows, title, out, AGAINST[against], chosen)
    return "\n\n".join(tables)


def run(arguments: Arguments) -> int:
    """Compare and print."""
    print(compare(arguments.folders, arguments.out, arguments.against, arguments.target, fitted, new=True))
    print(f"\nfigure: {arguments.out}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    with guarded() as ended:
        ended.code = run(command(Arguments, "compare", argv))
    return ended.code


if __name__ == "__main__":
    sys.exit(main())
