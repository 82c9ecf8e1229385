"""Compare runs in one figure and one table: `python -m fl.compare FOLDER... [--out FILE]`, or in a page: `--html FILE`.

`--against rounds|traffic|macs|seconds|simulated` says what curves are drawn against, and `--target 0.7` what costs are
counted up to.

Runs that differ in their seed alone are one line: mean and standard deviation over seeds.
"""

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fl.analysis.background import are_left
from fl.analysis.groups import (
    AGAINST,
    RecordedRun,
    add_cost_column,
    describe_common,
    find_runs,
    find_selected_round,
    group,
    make_table,
    target_table,
)
from fl.base.console import guard
from fl.base.errors import FLError
from fl.base.files import write_text
from fl.base.settings import choice
from fl.base.tables import fit_terminal, wrap_columns
from fl.settings.help import command


@dataclass(frozen=True)
class CompareArguments:
    """Draw runs in one figure (mean and deviation over seeds) and print a table."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """run folders, or folders that hold some"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """the figure; must be new; comparison.png, or none with --html"""
    html: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """a page that needs no network, with curves to read values off, results, settings, commands and the partition;
    must be new"""
    every: Annotated[float | None, tyro.conf.arg(metavar="SECONDS")] = None
    """with --html, seconds after which the page is written again, until all runs have ended; it reloads itself"""
    against: Annotated[str, tyro.conf.arg(metavar="|".join(AGAINST))] = "rounds"
    """what curves are drawn against: rounds, what a client sent and received (traffic), the multiply-accumulates of all
    clients' forward passes in training (macs; a step costs about three times as many), seconds of training, or the
    seconds of --pace (simulated)"""
    target: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """a test accuracy in (0, 1], or a perplexity above 1: what runs took to reach it is a second table"""


def compare(
    folders: Sequence[Path],
    out: Path,
    against: str = "rounds",
    target: float | None = None,
    lay_out: Callable[[Sequence[Sequence[str]]], str] = wrap_columns,
    new: bool = False,
) -> str:
    """Draw the runs of the folders into one figure, and return the table.

    With a target, a second table is below it.

    Args:
        against: what curves are drawn against, one of `AGAINST`.
        lay_out: makes the text of a table's cells, see `fl.base.tables`.
        new: whether the figure must not be there yet.
    """
    from fl.figures.curves import comparison_figure
    from fl.figures.style import check_new

    choice("--against", [against], AGAINST)
    groups = group(find_runs(folders))
    text = tables(groups, target, lay_out)
    title = describe_common([run.config for runs in groups.values() for run in runs])
    rows = {label: [add_cost_column(run, against) for run in runs] for label, runs in groups.items()}
    if new:
        check_new(out)
    chosen = {label: [find_selected_round(run) for run in runs] for label, runs in groups.items()}
    comparison_figure(rows, title, out, AGAINST[against], chosen)
    return text


def tables(
    groups: dict[str, list[RecordedRun]], target: float | None, lay_out: Callable[[Sequence[Sequence[str]]], str]
) -> str:
    """Make the table of results, and with a target a second one below it."""
    both = [make_table(groups, lay_out)] + ([] if target is None else [target_table(groups, target, lay_out)])
    return "\n\n".join(both)


def write_page(arguments: CompareArguments) -> str:
    """Write the page about the runs; return the tables.

    With --every it is written again until all runs have ended.
    """
    from fl.figures.report import check_page, report

    path, every, folders = arguments.html, arguments.every, arguments.folders
    choice("--against", [arguments.against], AGAINST)
    check_page(path)
    runs = find_runs(folders, quiet=every is not None)
    write_text(path, report(folders, runs, arguments.against, arguments.target, every))
    if every is not None and are_left(folders, runs):
        print(f"{path} is written again every {every:g} s until all runs have ended; Ctrl-C stops that", flush=True)
    while every is not None and are_left(folders, runs):
        time.sleep(every)
        try:
            runs = find_runs(folders, quiet=True)
            write_text(path, report(folders, runs, arguments.against, arguments.target, every))
        except FLError as error:  # such as a run that is being replaced
            print(f"not written again: {error}", file=sys.stderr)
    return tables(group(runs), arguments.target, fit_terminal)


def run(arguments: CompareArguments) -> int:
    """Compare and print."""
    from fl.figures.style import check_new

    out, html = arguments.out, arguments.html
    if arguments.every is not None and (html is None or not 0 < arguments.every < math.inf):
        raise FLError("--every is a number of seconds above 0 after which --html FILE is written again: give both")
    if html is not None:
        if out is not None:
            check_new(out)  # before a page is written that may take until all runs end
        text = write_page(arguments)
    if html is None or out is not None:
        out = out or Path("comparison.png")
        text = compare(arguments.folders, out, arguments.against, arguments.target, fit_terminal, new=True)
    print(text)
    print("\n" + "\n".join(f"{label}: {file}" for label, file in (("figure", out), ("page", html)) if file))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    with guard() as ended:
        ended.code = run(command(CompareArguments, "compare", argv))
    return ended.code


if __name__ == "__main__":
    sys.exit(main())
