"""`python -m surgery narrow`, `prune` and `widen`: checkpoints of narrower and of wider models."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from surgery.commands.one import File, Model, Number, Out, Patterns, Plan, Shape, carry_out


@dataclass(frozen=True)
class Narrow:
    """Narrow a checkpoint: keep the first positions of every hidden width."""

    file: File
    """the checkpoint"""
    rate: Number
    """share of every hidden width to keep, in (0, 1]"""
    out: Out
    """the new checkpoint"""
    model: Model = None
    """timm:NAME, torchvision:NAME or module:factory; folders of transformers' models need none"""
    input: Shape = None
    """shape of one input [the one that the model was made for]"""
    keep: Patterns = ()
    """modules whose tensors stay whole, such as layer1 or '*.downsample'; may be given several times"""
    heads: Literal["inside", "drop"] = "inside"
    """what is done to attention: slice inside every head, or drop heads"""
    strict: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """end with an error if a width that was to shrink stays whole"""
    plan: Plan = None
    """where to write the plan, by which the narrow model lies in the given one"""

    def run(self) -> None:
        """Carry out the command."""
        settings = {"rate": self.rate, "keep": self.keep, "heads": self.heads, "strict": self.strict}
        common = {"file": self.file, "out": self.out, "model": self.model, "shape": self.input, "plan": self.plan}
        carry_out("narrow", settings, **common)


@dataclass(frozen=True)
class Prune:
    """Narrow a checkpoint to a given size: positions of all widths compete for staying by their importance."""

    file: File
    """the checkpoint"""
    out: Out
    """the new checkpoint"""
    model: Model = None
    """timm:NAME, torchvision:NAME or module:factory; folders of transformers' models need none"""
    macs: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """the share of multiply-accumulates to keep, in (0, 1]"""
    parameters: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """the share of parameters to keep, in (0, 1]"""
    by: Literal["l1", "l2", "bn_scale"] = "l1"
    """how important a position is: by the norm of its weights, or by batch norms' scales"""
    input: Shape = None
    """shape of one input [the one that the model was made for]"""
    plan: Plan = None
    """where to write the plan, by which the narrow model lies in the given one"""

    def run(self) -> None:
        """Carry out the command."""
        settings = {"macs": self.macs, "parameters": self.parameters, "by": self.by}
        common = {"file": self.file, "out": self.out, "model": self.model, "shape": self.input, "plan": self.plan}
        carry_out("prune", settings, **common)


@dataclass(frozen=True)
class Widen:
    """Widen a checkpoint: every hidden width repeats its positions, and the outputs stay the same."""

    file: File
    """the checkpoint"""
    rate: Number
    """how many times as wide the model becomes, above 1; norms over a width allow whole numbers only"""
    out: Out
    """the new checkpoint, of a model built that wide"""
    model: Model = None
    """timm:NAME, torchvision:NAME or module:factory; folders of transformers' models need none"""
    mode: Literal["copy", "zero"] = "copy"
    """how what reads a width makes up for its copies: each copy is read with its share of the weight, or new ones with
    weight 0, so that every old number stays"""
    noise: Annotated[float, tyro.conf.arg(metavar="SHARE")] = 0.0
    """noise in the weights that make new positions, as a share of the weights' standard deviation, so that copies learn
    apart"""
    seed: int = 0
    """of the noise"""
    input: Shape = None
    """shape of one input [the one that the model was made for]"""
    keep: Patterns = ()
    """modules whose tensors stay as they are, such as layer1 or '*.downsample'; may be given several times"""
    heads: Literal["inside", "drop"] = "drop"
    """what is done to attention: repeat heads (drop, the inverse of what narrow does then), or nothing (inside)"""
    strict: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """end with an error if a hidden width cannot grow"""
    plan: Plan = None
    """where to write the plan, by which the given model lies in the wide one"""

    def run(self) -> None:
        """Carry out the command."""
        settings = {"rate": self.rate, "mode": self.mode, "noise": self.noise, "seed": self.seed}
        settings |= {"keep": self.keep, "heads": self.heads, "strict": self.strict}
        common = {"file": self.file, "out": self.out, "model": self.model, "shape": self.input, "plan": self.plan}
        carry_out("widen", settings, **common)
