"""Operations on tensors, for which no model is needed."""

from collections.abc import Mapping
from pathlib import Path

import torch

from surgery import adapters, lazy
from surgery.errors import SurgeryError, about
from surgery.lazy import LazyState, pieces_of
from surgery.merge.driver import check_patterns
from surgery.names import matches
from surgery.operations.arguments import AdapterFolder, PlanFile, shown
from surgery.operations.checkpoint import Model
from surgery.plan.submodel import Submodel


def extract(model: Model, *, plan: PlanFile) -> Model:
    """Cut a small model out of a checkpoint by a plan.

    Args:
        model: the large model's checkpoint
        plan: the plan, as `narrow`, `ungraft` or Submodel.save write it

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


def replace(first: Model, *, others: Mapping[str, Model]) -> Model:
    """Take the tensors that match a pattern from another checkpoint.

    Args:
        first: gives all tensors that no pattern matches
        others: checkpoints by patterns of tensor names, of which the first that matches counts
    """
    for pattern in others:
        check_patterns("others", {pattern: 0}, first.values)
    entries = {}
    for name in first.values:
        source = next((one.values for pattern, one in others.items() if matches(name, pattern)), first.values)
        if name not in source or pieces_of(source, name).shape != first.values.pieces(name).shape:
            raise SurgeryError(f"tensor {name!r} is missing in the other model, or has another shape")
        entries[name] = pieces_of(source, name)
    return first.alike(LazyState(entries))


def cast(model: Model, *, dtype: str) -> Model:
    """Convert a checkpoint into another floating-point type, such as bfloat16."""
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise SurgeryError(f"dtype={shown(dtype)}: give a floating-point type of torch, such as float32 or bfloat16")
    return model.alike(lazy.cast(model.values, found), model.plan)


def fold(model: Model, *, adapter: AdapterFolder, subtract: bool = False) -> Model:
    """Fold an adapter of low rank (LoRA), in a folder of peft's, into the weights of its base.

    Args:
        model: the base's checkpoint
        adapter: a folder with adapter_config.json and adapter_model.safetensors
        subtract: take the adapter out of weights again that it was folded into

    Returns:
        the new checkpoint
    """
    return model.alike(adapters.fold(model.values, adapter, subtract=subtract), model.plan)


def plan_of(path: str | Path) -> Submodel:
    """The plan of a file; SurgeryError that names the file if it holds none."""
    try:
        with about(str(path)):
            return Submodel.load(path)
    except OSError as error:
        raise SurgeryError(f"{path} cannot be read: {error.strerror or error}") from None
