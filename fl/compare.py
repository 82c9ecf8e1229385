"""Compare runs in one figure and one table: `python -m fl.compare FOLDER... [--out FILE]`.

`--against rounds|traffic|macs|seconds` says what curves are drawn against, `--target 0.7` what costs are counted up to.

Runs that differ in their seed alone are one line: mean and standard deviation over seeds.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fl.base.console import guarded
from fl.base.errors import FLError
from fl.base.tables import fitted
from fl.config.help import command
from fl.figures.comparison import compare


@dataclass(frozen=True)
class Arguments:
    """Draw runs in one figure (mean and standard deviation over seeds) and print a table."""

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """run folders, or folders that hold some"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("comparison.png")
    """the figure; must be new"""
    against: Annotated[str, tyro.conf.arg(metavar="rounds|traffic|macs|seconds")] = "rounds"
    """what curves are drawn against: rounds, what a client sent and received (traffic), the multiply-accumulates of all
    clients' forward passes in training (macs; a step costs about three times as many), or seconds of training"""
    target: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """a test accuracy in (0, 1], or a perplexity above 1: what runs took to reach it is a second table"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code."""
    return guarded(lambda: run(command(Arguments, "compare", argv)))


def run(arguments: Arguments) -> int:
    """Compare and print."""
    if not arguments.folders:
        raise FLError("give at least one run folder")
    print(compare(arguments.folders, arguments.out, arguments.against, arguments.target, fitted, new=True))
    print(f"\nfigure: {arguments.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
