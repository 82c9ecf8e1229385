"""The commands that follow a plan: a small model out of a large one, and back."""

from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from surgery.commands import flags
from surgery.commands.checkpoint import Model, To, plan_of

PlanFile = Annotated[Path, arg(metavar="PLAN.json")]


def extract(file: Positional[flags.File], *, plan: PlanFile, to: To) -> None:
    """Cut a small model out of a checkpoint by a plan.

    Args:
        file: the large model's checkpoint
        plan: the plan, as `narrow`, `ungraft` or Plan.save write it
    """
    loaded_plan, model = plan_of(plan), Model(file)
    small = loaded_plan.build(model.build()) if model.described else None
    record = {"do": "extract", "plan": str(plan)}
    to.write(loaded_plan.extract(model.values), record, {"model": model}, like=model, module=small)


def embed(file: Positional[flags.File], *, plan: PlanFile, into: flags.OptionalFile = None, to: To) -> None:
    """Lay a small model back into the large one by its plan.

    Args:
        file: the small model's checkpoint
        plan: the plan
        into: a checkpoint of the large model, whose values stay where the small one has none [zeros]
    """
    loaded_plan, model, record = plan_of(plan), Model(file), {"do": "embed", "plan": str(plan)}
    if into is None:
        to.write(loaded_plan.embed(model.values)[0], record, {"model": model})
        return
    large = Model(into)
    full = large.build() if large.described else None
    values = loaded_plan.embed(model.values, into=large.values)[0]
    to.write(values, record, {"model": model, "into": large}, like=large, module=full)
