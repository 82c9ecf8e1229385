"""`python -m surgery narrow` and `prune`: checkpoints of narrower models."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from surgery.commands.depth import File, Model, Out, Plan, Shape, example_for
from surgery.commands.models import build, config_of, state_for
from surgery.commands.plans import save_plan
from surgery.commands.shared import save, source
from surgery.errors import SurgeryError


@dataclass(frozen=True)
class Narrow:
    """Narrow a checkpoint: keep the first positions of every hidden width."""

    file: File
    """the checkpoint"""
    rate: Annotated[float, tyro.conf.arg(metavar="RATE")]
    """share of every hidden width to keep, in (0, 1]"""
    out: Out
    """the new checkpoint"""
    model: Model = None
    """timm:NAME, torchvision:NAME or module:factory; needed, but for folders of transformers' models"""
    input: Shape = None
    """shape of one input [the one that the model was made for]"""
    keep: tyro.conf.UseAppendAction[Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATTERN")]] = ()
    """modules whose tensors stay whole, such as layer1 or '*.downsample'; may be given several times"""
    heads: Literal["inside", "drop"] = "inside"
    """what is done to attention: slice inside every head, or drop heads"""
    strict: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """end with an error if a width that was to shrink stays whole"""
    plan: Plan = None
    """where to write the plan, by which the narrow model lies in the given one"""

    def run(self) -> None:
        """Carry out the command."""
        from surgery.files import check_new, open_state
        from surgery.lazy_plans import extract
        from surgery.width.narrow import narrow

        check_new(self.out)
        checkpoint = open_state(self.file)
        model = build(self.model, checkpoint)
        values = state_for(model, checkpoint)
        example = example_for(model, self.input)
        small, plan = narrow(
            model, rate=self.rate, example=example, keep=self.keep, heads=self.heads, strict=self.strict
        )
        made = {"do": "narrow", "rate": self.rate, "inputs": [source(checkpoint)]}
        save(self.out, extract(plan, values), made=made, like=checkpoint, config=config_of(small))
        save_plan(self.plan, plan)


@dataclass(frozen=True)
class Prune:
    """Narrow a checkpoint to a given size: positions of all widths compete for staying by their importance."""

    file: File
    """the checkpoint"""
    out: Out
    """the new checkpoint"""
    model: Model = None
    """timm:NAME, torchvision:NAME or module:factory; needed, but for folders of transformers' models"""
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
        from surgery.files import check_new, open_state
        from surgery.lazy_plans import extract
        from surgery.states import load
        from surgery.width.importance import importance
        from surgery.width.narrow import narrow
        from surgery.width.target import Target

        if (self.macs is None) == (self.parameters is None):
            raise SurgeryError("prune needs a size: give --macs SHARE or --parameters SHARE")
        check_new(self.out)
        checkpoint = open_state(self.file)
        model = build(self.model, checkpoint)
        values = state_for(model, checkpoint)
        load(model, {name: values[name] for name in values})
        example = example_for(model, self.input)
        scores = importance(model, example=example, by=self.by)
        target = Target(macs=self.macs) if self.parameters is None else Target(parameters=self.parameters)
        small, plan = narrow(model, target=target, keep_top=scores, example=example)
        made = {"do": "prune", "macs": self.macs, "parameters": self.parameters, "inputs": [source(checkpoint)]}
        save(self.out, extract(plan, values), made=made, like=checkpoint, config=config_of(small))
        save_plan(self.plan, plan)
