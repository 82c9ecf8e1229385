"""`python -m surgery merge METHOD FILE... --out FILE`."""

from dataclasses import dataclass
from inspect import Parameter
from pathlib import Path
from typing import Annotated

import tyro

from surgery.commands.shared import Floats, save, settings, size_in_bytes, source, summary
from surgery.errors import SurgeryError


@dataclass(frozen=True)
class Merge:
    """Merge checkpoints of one architecture, tensor by tensor, without holding them in memory."""

    method: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="METHOD")]
    """linear, slerp, multislerp, karcher, nearswap, task_arithmetic, ties, dare, breadcrumbs, della, model_stock, or
    sce"""
    files: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FILE...")]
    """.safetensors or .pt files, or folders as HuggingFace's libraries write them"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """the new file, or a new folder, which also gets the other files of the first folder"""
    base: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """the model that the others were fine-tuned from"""
    weights: Annotated[Floats, tyro.conf.arg(metavar="FLOAT,...")] = None
    """a weight for each file [1 each]"""
    set: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="[PATTERN:]NAME=VALUE")]] = ()
    """a setting of the method, for all tensors or for those whose name matches: --set density=0.5 --set
    'layer4:density=0.2'"""
    shard_size: Annotated[str | None, tyro.conf.arg(metavar="SIZE")] = None
    """in a folder: the size above which the result is split into several files, such as 5GB"""
    dry_run: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """check everything and print what would be written"""

    def run(self) -> None:
        """Carry out the command."""
        from surgery.files import check_new, open_state
        from surgery.merge.methods import method

        chosen = method(self.method)
        check_new(self.out)
        files = [open_state(path) for path in self.files]
        given = settings(self.set, chosen.settings)
        if self.weights is not None:
            if not chosen.weights:
                raise SurgeryError(f"{self.method} takes no --weights: leave them out")
            given["weights"] = list(self.weights)
        if self.base is not None:
            if chosen.base == "none":
                raise SurgeryError(f"{self.method} takes no --base: leave it out")
            given["base"] = open_state(self.base)
        elif chosen.base == "needed":
            raise SurgeryError(f"{self.method} needs the model that the others were fine-tuned from: give --base FILE")
        if lacking := [
            name for name, default in chosen.settings.items() if default is Parameter.empty and name not in given
        ]:
            raise SurgeryError(f"{self.method} needs --set {lacking[0]}=VALUE")
        result = chosen.function(files, **given)
        if self.dry_run:
            print(f"would write {self.out}: {summary(result)}")
            return
        told = {name: value for name, value in given.items() if name != "base"}
        made = {"method": self.method, **told, "inputs": [source(file) for file in files]}
        if self.base is not None:
            made["base"] = source(given["base"])
        save(self.out, result, made=made, like=files[0], shard_bytes=size_in_bytes(self.shard_size))
