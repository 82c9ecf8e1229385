"""List run folders with what they have reached: `python -m fl.runs [FOLDER]`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fl.base.console import guarded
from fl.base.tables import terminal
from fl.config.help import command
from fl.runs.listing import listing, table


@dataclass(frozen=True)
class Arguments:
    """List the runs in a folder and below it: method, data, model, rounds done, test accuracy in the last evaluated
    round, and whether they have finished, failed, are running or were interrupted. `python -m fl.run --resume`
    continues an interrupted one.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """where to look"""


def run(arguments: Arguments) -> int:
    """Look and print."""
    runs, damaged = listing(arguments.folder)
    if runs:
        print(table(runs, terminal()))
    for folder, reason in damaged.items():
        print(f"warning: {folder} is left out: {reason}", file=sys.stderr)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for a folder without runs."""
    return guarded(lambda: run(command(Arguments, "runs", argv)))


if __name__ == "__main__":
    sys.exit(main())
