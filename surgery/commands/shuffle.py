"""`python -m surgery shuffle FILE... --out FOLDER`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from surgery.commands.shared import save, source
from surgery.errors import SurgeryError


@dataclass(frozen=True)
class Shuffle:
    """Recombine checkpoints of one architecture: every layer of every one is used exactly once, in a new one."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE...")]
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
        import torch

        from surgery.decomposition import layers
        from surgery.files import open_state
        from surgery.lazy import LazyState, metas
        from surgery.recombine import permutations, segments
        from surgery.states import check_same

        if len(self.files) < 2:
            raise SurgeryError("shuffle exchanges layers between models: give at least two checkpoints")
        files = [open_state(path) for path in self.files]
        for file in files[1:]:
            check_same(metas(files[0]), metas(file), str(files[0].path), str(file.path))
        parts = segments(layers(metas(files[0]), unit=self.unit))
        generator = torch.Generator().manual_seed(self.seed)
        swaps = permutations(len(parts), k=len(files), generator=generator, derange=self.derange).tolist()
        self.out.mkdir()
        made = {"do": "shuffle", "unit": self.unit, "seed": self.seed, "inputs": [source(file) for file in files]}
        for k in range(len(files)):
            places = {name: files[swaps[i][k]] for i, names in enumerate(parts) for name in names}
            mixed = LazyState({name: places[name].pieces(name) for name in files[0]})
            save(self.out / f"{k}.safetensors", mixed, made={**made, "model": k})
