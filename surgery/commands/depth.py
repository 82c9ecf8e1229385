"""The commands that change the depth of a checkpoint."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

import surgery
from surgery.commands import flags
from surgery.commands.checkpoint import From, Model, PlannedOutput, ToPlanned
from surgery.depth.sections import ordered_sections
from surgery.errors import SurgeryError
from surgery.lazy import metas
from surgery.plan import Plan


def graft(source: From, *, depths: flags.Counts, to: ToPlanned) -> None:
    """Repeat the last block of each section.

    The --model is needed unless the tensors' names show the blocks.

    Args:
        depths: the new number of blocks of each section
    """
    _change(source.open(), surgery.graft, lambda plan, values: plan.embed(values)[0], to, "graft", depths=list(depths))


def ungraft(source: From, *, keep: flags.Counts, to: ToPlanned) -> None:
    """Keep the first blocks of each section.

    The --model is needed unless the tensors' names show the blocks.

    Args:
        keep: the number of blocks of each section that stay
    """
    _change(source.open(), surgery.ungraft, Plan.extract, to, "ungraft", keep=list(keep))


def _change(
    model: Model,
    change: Callable,
    apply: Callable[[Plan, Mapping[str, Tensor]], Mapping[str, Tensor]],
    to: PlannedOutput,
    name: str,
    **depths: Any,
) -> None:
    """Change the model or, if it is not known, the model that its tensors' names show."""
    if model.described:
        changed, plan = change(model.build(), example=model.run_arguments()["example"], **depths)
    else:
        shapes = metas(model.values)
        if hidden := [section.name for section, known in ordered_sections(shapes).items() if not known]:
            raise SurgeryError(
                f"{model.path} does not show whether the blocks of {', '.join(map(repr, hidden))} run one after "
                "another, or beside each other, as experts do: give the model (--model)",
                code="ambiguous",
            )
        (_, plan), changed = change(shapes, **depths), None
    record = {"do": name, **depths}
    to.write(apply(plan, model.values), record, {"model": model}, like=model, module=changed)
    to.write_plan(plan)
