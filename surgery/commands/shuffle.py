"""`python -m surgery shuffle FILE... --out FOLDER`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from surgery.commands.one import Files
from surgery.commands.shared import save, source


@dataclass(frozen=True)
class Shuffle:
    """Recombine checkpoints of one architecture: every layer of every one is used exactly once, in a new one."""

    files: Files
    """at least two checkpoints"""
    out: Annotated[Path, tyro.conf.arg(metavar="FOLDER")]
    """a new folder, which gets 0.safetensors, 1.safetensors, ..."""
    unit: Literal["layer", "block", "tensor"] = "layer"
    """what moves as one piece"""
    seed: int = 0
    """of the draw"""
    derange: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """no piece stays in its place"""

    def run(self) -> None:
        """Carry out the command."""
        from surgery.files import check_absent
        from surgery.operations.mixtures import shuffle
        from surgery.operations.subject import Subject

        files = [Subject.open(path) for path in self.files]
        mixed = shuffle(files, unit=self.unit, seed=self.seed, derange=self.derange)
        check_absent(self.out, folder=True)
        self.out.mkdir(exist_ok=True)
        inputs = [source(file.checkpoint) for file in files]
        made = {"do": "shuffle", "unit": self.unit, "seed": self.seed, "derange": self.derange, "inputs": inputs}
        for k, one in enumerate(mixed):
            save(self.out / f"{k}.safetensors", one.values, made={**made, "model": k})
