"""Draw which clients share models, beside the truth: `python -m fl.structure FOLDER... [--out FILE]` (FeMAM's Fig. 4).

    python -m fl.run --algorithm femam --partition clusters --clusters 5 --name found
    python -m fl.structure runs/found

Methods that give each client at most one model on each level leave a structure.json in their run folder.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from fl.analysis.structure import agreement, describe, find
from fl.base.console import guard
from fl.settings.help import command


@dataclass(frozen=True)
class StructureArguments:
    """Draw which clients share models on each level, and compare with the truth.

    ARI is the adjusted Rand index over the clients that kept a model: 1 for the same clusters, about 0 for random ones
    and for a single one.
    """

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """run folders, or folders that hold some"""
    out: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """the figure; must be new [structure.png, and none with --json]"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print the table as JSON"""


def run(arguments: StructureArguments) -> int:
    """Draw and print."""
    structures = find(arguments.folders)
    out = arguments.out or (None if arguments.json else Path("structure.png"))
    if out is not None:
        from fl.figures.clients import structure_maps
        from fl.figures.style import check_new, save

        check_new(out)
        save(structure_maps(list(structures.values())), out)
    if arguments.json:
        rows = {
            str(path): [row._asdict() | {"best": row.best} for row in agreement(s)] for path, s in structures.items()
        }
        print(json.dumps(rows))
    else:
        print("\n\n".join(f"{path}\n{describe(structure)}" for path, structure in structures.items()))
        print(f"\nfigure: {out}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    with guard() as ended:
        ended.code = run(command(StructureArguments, "structure", argv))
    return ended.code


if __name__ == "__main__":
    sys.exit(main())
