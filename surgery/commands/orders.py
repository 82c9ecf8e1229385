"""`python -m surgery permute` and `align`: widths in another order, in which the model computes what it did."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from surgery.commands.one import File, Model, Out, Plan, Shape, carry_out


@dataclass(frozen=True)
class Permute:
    """Put the positions of hidden widths in another order; the model computes the same."""

    file: File
    """the checkpoint"""
    out: Out
    """the new checkpoint"""
    permutations: Annotated[Path | None, tyro.conf.arg(metavar="FILE.json")] = None
    """the new order of each width, {"fc1.weight:0": [2, 0, 1]} puts position 2 first; or a plan that permute or align
    has written, which needs no --model"""
    sort_by: Literal["l1", "l2", "bn_scale"] | None = None
    """put the most important positions first, by the norm of their weights or by batch norms' scales"""
    inverse: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """undo the --permutations"""
    model: Model = None
    """timm:NAME, torchvision:NAME or module:factory; folders of transformers' models need none"""
    input: Shape = None
    """shape of one input [the one that the model was made for]"""
    plan: Plan = None
    """where to write the plan, which `permute --inverse --permutations PLAN.json` undoes"""

    def run(self) -> None:
        """Carry out the command."""
        settings = {"permutations": self.permutations, "sort_by": self.sort_by, "inverse": self.inverse}
        common = {"file": self.file, "out": self.out, "model": self.model, "shape": self.input, "plan": self.plan}
        carry_out("permute", settings, **common)


@dataclass(frozen=True)
class Align:
    """Put the hidden widths of a checkpoint in the order in which they match another checkpoint's."""

    file: File
    """the checkpoint"""
    to: Annotated[Path, tyro.conf.arg(metavar="FILE")]
    """the checkpoint to match, of the same architecture"""
    out: Out
    """the new checkpoint, which computes what the first one does"""
    by: Literal["weights", "activations"] = "weights"
    """what has to match: the weights, or what layers read on some --data"""
    data: Annotated[str | None, tyro.conf.arg(metavar="MODULE:FUNCTION")] = None
    """a function of yours that gives batches of inputs, for --by activations"""
    model: Model = None
    """timm:NAME, torchvision:NAME or module:factory; folders of transformers' models need none"""
    input: Shape = None
    """shape of one input [the one that the model was made for]"""
    plan: Plan = None
    """where to write the plan, which `permute --inverse --permutations PLAN.json` undoes"""

    def run(self) -> None:
        """Carry out the command."""
        common = {"file": self.file, "out": self.out, "model": self.model, "shape": self.input, "plan": self.plan}
        carry_out("align", {"by": self.by, "data": self.data}, others={"to": self.to}, **common)
