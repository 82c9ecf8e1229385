"""`python -m surgery graft` and `ungraft`: checkpoints of deeper and of shallower models."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from surgery.commands.models import build, config_of, state_for
from surgery.commands.plans import save_plan
from surgery.commands.shared import Integers, save, source

if TYPE_CHECKING:
    from torch import nn

File = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="FILE")]
Out = Annotated[Path, tyro.conf.arg(metavar="FILE")]
Plan = Annotated[Path | None, tyro.conf.arg(metavar="PLAN.json")]
Model = Annotated[str | None, tyro.conf.arg(metavar="MODEL")]
Shape = Annotated[Integers, tyro.conf.arg(metavar="INT,...")]


def example_for(model: "nn.Module", shape: tuple[int, ...] | None) -> Any:
    """An input of a model: zeros of the given shape (without the batch), tokens for models of transformers."""
    import torch

    from surgery.libraries import example_input

    if getattr(model, "main_input_name", None) == "input_ids":
        return {"input_ids": torch.ones(2, *(shape or (8,)), dtype=torch.long)}
    return example_input(model) if shape is None else torch.zeros(2, *shape)


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
        from surgery.depth.graft import graft
        from surgery.lazy_plans import embed

        _carry_out(self, partial(graft, depths=list(self.depths)), embed, {"do": "graft", "depths": list(self.depths)})


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
        from surgery.depth.ungraft import ungraft
        from surgery.lazy_plans import extract

        _carry_out(self, partial(ungraft, keep=list(self.keep)), extract, {"do": "ungraft", "keep": list(self.keep)})


def _carry_out(
    command: Graft | Ungraft, change: Callable[..., Any], by_plan: Callable[..., Any], made: dict[str, Any]
) -> None:
    """Change the model, or what the names show of it, and write what the plan makes of the checkpoint.

    Args:
        change: model or state -> (what becomes of it, the plan).
        by_plan: (plan, values) -> the new values.
        made: the operation and its settings, for the provenance.
    """
    from surgery.files import check_new, open_state
    from surgery.lazy import metas

    check_new(command.out)
    checkpoint, config = open_state(command.file), None
    values = checkpoint
    if command.model is None and not (checkpoint.is_folder and (checkpoint.path / "config.json").is_file()):
        _, plan = change(metas(values))
    else:
        model = build(command.model, checkpoint)
        values = state_for(model, checkpoint)
        changed, plan = change(model, example=example_for(model, command.input))
        config = config_of(changed)
    made |= {"inputs": [source(checkpoint)]}
    save(command.out, by_plan(plan, values), made=made, like=checkpoint, config=config)
    save_plan(command.plan, plan)
