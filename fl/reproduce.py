"""Run a cell of the papers' tables and figures: `python -m fl.reproduce ID [--seeds .. --rounds .. --minutes M]`.

Without an ID it lists the cells with what is there of each.
"""

if __name__ == "__main__":  # before the imports below, which --help does not wait for
    from fl.__main__ import start

    start("reproduce")

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fl.base.console import guarded
from fl.base.errors import FLError
from fl.base.flags import AtLeast0, Natural, several
from fl.base.help import command
from fl.base.tables import aligned
from fl.papers import page, stored
from fl.papers.cells import cells, find
from fl.papers.play import Part, play
from fl.papers.results import result
from fl.runs.one_run import simulate

_Names = Annotated[tuple[str, ...], several(str, "NAME,...", empty="all")]
_Seeds = Annotated[tuple[int, ...], several(int, "INT,...", least=0, below=2**32, empty="all")]


@dataclass(frozen=True)
class Arguments:
    """Run a cell of a paper's table or figure, store what it measures in benchmarks/results/papers, and bring
    docs/results/papers.md up to date. Finished runs are kept, interrupted ones resumed, so that a long cell can be run
    in parts. Without ID, or with the beginning of one, it lists the cells and the verdict on each.
    """

    id: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="ID")] = ""
    """such as fedmr.table1.cifar10.lenet.dir0.5, or the beginning of ids, such as femam.table1."""
    algorithm: _Names = ()
    """which of the cell's methods (or other lines) to run"""
    seeds: _Seeds = ()
    """which seeds; all are the paper's"""
    rounds: Natural = 0
    """another number of rounds; 0 is the cell's. With fewer the cell counts as not run, and the page says what they
    show"""
    minutes: AtLeast0 = 0.0
    """stop after so many minutes; the same command goes on later. 0 is never"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto is a GPU if there is one"""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")] = Path("runs/papers")
    """where run folders lie, with the checkpoints of interrupted runs"""
    page: tyro.conf.FlagCreatePairsOff[bool] = False
    """only make docs/results/papers.md again from the stored runs"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for what cannot be run, 130 on Ctrl-C."""
    return guarded(lambda: run(command(Arguments, "reproduce", argv)))


def run(arguments: Arguments) -> int:
    """Run a part of a cell, or list the cells."""
    if not page.PAGE.parent.is_dir():
        raise FLError(
            f"the papers' runs are kept in a checkout of this project, and {stored.ROOT} is none: clone it, and "
            "pip install -e . there"
        )
    if arguments.page:
        page.write_page()
        print(f"page      {page.PAGE}")
        return 0
    if arguments.id not in cells() and (listed := [name for name in cells() if name.startswith(arguments.id)]):
        lines = [[name, page.said(result(cells()[name]))] for name in listed]
        print(aligned([["cell", "verdict"], *lines], left=2))
        return 0
    cell = find(arguments.id)
    part = Part(
        arguments.algorithm, arguments.seeds, arguments.rounds, arguments.minutes, arguments.device, arguments.out
    )
    try:
        done = play(cell, part, simulate)
    finally:
        page.write_page()
    print(f"{cell.id}: {page.said(result(cell))}{'' if done else '; the same command goes on'}")
    print(f"stored    {stored.STORE}/{cell.id}/\npage      {page.PAGE}")
    return 0
