"""All cells of the three papers, by id."""

import difflib
from functools import lru_cache

from fl.base.errors import FLError
from fl.papers import fedfa, fedmr, femam
from fl.papers.cell import Cell


@lru_cache
def cells() -> dict[str, Cell]:
    """From id to cell, paper by paper.

    >>> cells()["fedmr.table1.cifar10.lenet.dir0.5"].settings
    'LeNet, momentum 0.5'
    """
    found: dict[str, Cell] = {}
    for paper in (fedmr, femam, fedfa):
        for cell in paper.cells():
            if cell.id in found:
                raise FLError(f"two cells are called {cell.id}: rename one of them")
            found[cell.id] = cell
    return found


def find(name: str) -> Cell:
    """The cell of this id. Raises FLError, which names the nearest one, if there is none."""
    if name in cells():
        return cells()[name]
    near = difflib.get_close_matches(name, cells(), n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise FLError(f"no cell is called {name!r}: {hint}`python -m fl.reproduce` lists all {len(cells())}")
