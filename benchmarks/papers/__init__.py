"""The papers' tables and figures as cells that can be run, and the claims of their abstracts.

In reading order: cell.py (a cell), recipes/ (the papers' settings), fedmr.py, femam.py, fedfa.py, heterofl.py,
depthfl.py and adapters.py (the cells), stored.py and run.py (their runs), verdict.py and page.py (verdicts and their
page). `python -m benchmarks.papers` is the command.
"""

import difflib
from dataclasses import dataclass
from functools import lru_cache

from benchmarks.papers import adapters, depthfl, fedfa, fedmr, femam, heterofl
from benchmarks.papers.cell import Cell
from benchmarks.papers.recipes import RECIPES
from benchmarks.papers.verdict import NOT_RUN, UNKNOWN
from fl import FLError


@lru_cache
def cells() -> dict[str, Cell]:
    """Return all cells by id, paper by paper.

    >>> cells()["fedmr.table1.cifar10.lenet.dir0.5"].settings
    'LeNet, momentum 0.5'
    """
    by_id: dict[str, Cell] = {}
    for paper in (fedmr, femam, fedfa, heterofl, depthfl, adapters):
        for cell in paper.cells():
            if cell.id in by_id:
                raise FLError(f"two cells are called {cell.id}: rename one of them", code="name")
            by_id[cell.id] = cell
    return by_id


def find(name: str) -> Cell:
    """Return the cell with this id. Raises FLError, which names the nearest one, if there is none."""
    if name in cells():
        return cells()[name]
    near = difflib.get_close_matches(name, [*cells(), *RECIPES], n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise FLError(
        f"no cell and no recipe is called {name!r}: {hint}`python -m benchmarks.papers` lists all cells", code="name"
    )


@dataclass(frozen=True)
class Claim:
    """A claim of an abstract.

    Attributes:
        paper, text: the paper, and the claim in short.
        cells: how the ids of the cells begin that judge it.
        smaller: how the ids begin of cells in other settings than the paper's, which judge it while none of the paper's
            own was run.
        part: a part that each id must contain.
        at: the number of the comparison in a cell that judges it.
        elsewhere, word: the reason and the verdict while nothing was run.
    """

    paper: str
    text: str
    cells: tuple[str, ...] = ()
    smaller: str = ""
    part: str = ""
    at: int = 0
    elsewhere: str = "no cell was run"
    word: str = NOT_RUN

    def is_judged_by(self, name: str, smaller: bool) -> bool:
        """Return whether the cell with this id judges it."""
        return name.startswith((self.smaller or "-",) if smaller else self.cells) and self.part in name


_FEDFA = {"cells": ("fedfa.table1.",), "smaller": "fedfa.smaller."}
_ATTACKED = {"cells": ("fedfa.figure3.",), "smaller": "fedfa.smaller-attacked."}
CLAIMS = (
    Claim(
        "fedmr", "FedMR significantly improves the accuracy over the state of the art", ("fedmr.table1.",),
        "fedmr.smaller.accuracy.",
    ),
    Claim(
        "fedmr", "in a flat area, recombined models are optimized towards the same direction", ("fedmr.figure6.",),
        "fedmr.smaller.cosine.cifar10-",
        elsewhere="no run was made with the released code's measure, see `fedmr.plain-cosine` for the plain cosine",
    ),
    Claim("fedmr", "recombined models are guided towards a flat area", smaller="fedmr.smaller.flat.cifar10"),
    Claim(
        "fedmr", "no client's privacy is exposed",
        elsewhere="no measurement: tests hold who can read what in secure recombination (`tests/fl/secure`)",
        word=UNKNOWN,
    ),
    Claim(
        "femam", "FeMAM surpasses clustered and personalized methods in various non-IID settings",
        ("femam.table1.", "femam.tablec2.", "femam.tablec4.", "femam.tablec3."), "femam.smaller.",
    ),
    Claim("femam", "it finds how clients should share knowledge", smaller="femam.smaller-structure."),
    Claim("fedfa", "IID, global accuracy against earlier methods: 1.00 to 1.16 times", part=".iid.", **_FEDFA),
    Claim("fedfa", "non-IID, local accuracy: 0.98 to 1.13 times", part=".noniid.", at=1, **_FEDFA),
    Claim("fedfa", "non-IID, global accuracy: 0.95 to 1.20 times", part=".noniid.", **_FEDFA),
    Claim("fedfa", "attacked, IID, earlier methods lose globally 1.01 to 2.11 times", part=".iid.", **_ATTACKED),
    Claim("fedfa", "attacked, non-IID, they lose locally 0.89 to 3.31 times", part=".noniid.", at=1, **_ATTACKED),
    Claim("fedfa", "attacked, non-IID, they lose globally 1.11 to 1.74 times", part=".noniid.", **_ATTACKED),
)  # fmt: skip
"""The claims of the three abstracts, paper by paper."""
