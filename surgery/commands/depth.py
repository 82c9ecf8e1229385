"""`python -m surgery graft` and `ungraft`: checkpoints of deeper and of shallower models."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from surgery.commands.one import File, Model, Out, Plan, Shape, carry_out
from surgery.commands.shared import Integers


@dataclass(frozen=True)
class Graft:
    """Deepen a checkpoint: repeat the last block of each section."""

    file: File
    """the checkpoint"""
    depths: Annotated[Integers, tyro.conf.arg(metavar="INT,...")]
    """the new number of blocks of each section"""
    out: Out
    """the new checkpoint"""
    model: Model = None
    """timm:NAME, torchvision:NAME or module:factory; needed where blocks are no entries of a Sequential [the tensors'
    names show the blocks]"""
    input: Shape = None
    """shape of one input, by which the deeper --model is tried [the one that the model was made for]"""
    plan: Plan = None
    """where to write the plan, by which the given model lies in the deeper one"""

    def run(self) -> None:
        """Carry out the command."""
        common = {"file": self.file, "out": self.out, "model": self.model, "shape": self.input, "plan": self.plan}
        carry_out("graft", {"depths": list(self.depths)}, **common)


@dataclass(frozen=True)
class Ungraft:
    """Make a checkpoint shallower: keep the first blocks of each section."""

    file: File
    """the checkpoint"""
    keep: Annotated[Integers, tyro.conf.arg(metavar="INT,...")]
    """the number of blocks of each section that stay"""
    out: Out
    """the new checkpoint"""
    model: Model = None
    """timm:NAME, torchvision:NAME or module:factory [the tensors' names show the blocks]"""
    input: Shape = None
    """shape of one input, by which the shallower --model is tried [the one that the model was made for]"""
    plan: Plan = None
    """where to write the plan, by which the shallower model lies in the given one"""

    def run(self) -> None:
        """Carry out the command."""
        common = {"file": self.file, "out": self.out, "model": self.model, "shape": self.input, "plan": self.plan}
        carry_out("ungraft", {"keep": list(self.keep)}, **common)
