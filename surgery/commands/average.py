"""`python -m surgery average FILE... --out FILE`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from surgery.commands.merge import Merge
from surgery.commands.one import Files
from surgery.commands.shared import Floats


@dataclass(frozen=True)
class Average:
    """Average checkpoints of one architecture; integer tensors (step counters) carry the maximum."""

    files: Files
    """.safetensors or .pt files, or folders as HuggingFace's libraries write them"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """the new file or folder"""
    weights: Annotated[Floats, tyro.conf.arg(metavar="FLOAT,...")] = None
    """a weight for each file [1 each]"""

    def run(self) -> None:
        """Carry out the command."""
        Merge("linear", self.files, self.out, weights=self.weights).run()
