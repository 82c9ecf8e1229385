"""Operations on tensors, for which no model is needed."""

from pathlib import Path

from surgery.errors import SurgeryError, about
from surgery.operations.arguments import PlanFile
from surgery.operations.checkpoint import Model
from surgery.plan.submodel import Plan


def extract(model: Model, *, plan: PlanFile) -> Model:
    """Cut a small model out of a checkpoint by a plan.

    Args:
        model: the large model's checkpoint
        plan: the plan, as `narrow`, `ungraft` or Plan.save write it

    Returns:
        the new checkpoint
    """
    found = plan_of(plan)
    small = found.build(model.built()) if model.described else None
    return model.becomes(found.extract(model.values), small, found)


def embed(model: Model, *, plan: PlanFile, into: Model | None = None) -> Model:
    """Lay a small model back into the large one by its plan.

    Args:
        model: the small model's checkpoint
        plan: the plan
        into: a checkpoint of the large model, whose values stay where the small one has none [zeros]

    Returns:
        the new checkpoint of the large model
    """
    found = plan_of(plan)
    if into is None:
        return Model(found.embed(model.values)[0], "the result", shape=model.shape, plan=found)
    full = into.built() if into.described else None
    return into.becomes(found.embed(model.values, into=into.values)[0], full, found)


def plan_of(path: str | Path) -> Plan:
    """The plan of a file; SurgeryError that names the file if it holds none."""
    try:
        with about(str(path)):
            return Plan.load(path)
    except OSError as error:
        raise SurgeryError(f"{path} cannot be read: {error.strerror or error}") from None
