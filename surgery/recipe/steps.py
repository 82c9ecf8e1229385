"""What the steps of a recipe do. Everything is planned before anything is read: results are lazy states."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.depth.graft import graft, ungraft
from surgery.errors import SurgeryError
from surgery.files import Checkpoint, open_state
from surgery.lazy import LazyState, metas, pieces_of
from surgery.lazy_plans import cast, embed, extract
from surgery.merge.methods import METHODS
from surgery.merge.settings import check_patterns
from surgery.recipe.reading import Recipe
from surgery.submodel import Submodel
from surgery.width.demand import matches

Values = Mapping[str, Tensor]
_STATES = ("model", "models", "base", "into", "first", "others")
"""Arguments that name inputs or earlier steps."""


def _extract(*, model: Values, plan: Path) -> LazyState:
    return extract(Submodel.load(plan), model)


def _embed(*, model: Values, plan: Path, into: Values | None = None) -> LazyState:
    return embed(Submodel.load(plan), model, into)


def _graft(*, model: Values, depths: Any) -> LazyState:
    _, plan = graft(metas(model), depths=depths)
    return embed(plan, model)


def _ungraft(*, model: Values, keep: Any) -> LazyState:
    _, plan = ungraft(metas(model), keep=keep)
    return extract(plan, model)


def _cast(*, model: Values, dtype: str) -> LazyState:
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise SurgeryError(f"dtype is a floating-point type of torch, such as float32 or bfloat16, got {dtype!r}")
    return cast(model, found)


def _replace(*, first: Values, others: Mapping[str, Values]) -> LazyState:
    """The first model with the tensors that match a pattern taken from another one."""
    if isinstance(others, LazyState):
        raise SurgeryError("replace takes `others` as entries PATTERN: NAME, as {'head.*': b}")
    for pattern in others:
        check_patterns("others", {pattern: 0}, first)
    entries = {}
    for name in first:
        source = next((values for pattern, values in others.items() if matches(name, pattern)), first)
        if name not in source or pieces_of(source, name).shape != pieces_of(first, name).shape:
            raise SurgeryError(f"tensor {name!r} is missing in the other model, or has another shape")
        entries[name] = pieces_of(source, name)
    return LazyState(entries)


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: method.function for name, method in METHODS.items()},
    "extract": _extract,
    "embed": _embed,
    "graft": _graft,
    "ungraft": _ungraft,
    "cast": _cast,
    "replace": _replace,
}
"""What a step may do, by name."""


def planned(recipe: Recipe, folder: Path) -> tuple[dict[str, Checkpoint], dict[str, LazyState]]:
    """The inputs and the results of all steps by name, of which nothing is computed yet.

    Raises:
        SurgeryError: that names the step, for an unknown operation or argument, for a name that is no input and no
            earlier step, and for everything that the operation refuses.
    """
    inputs = {name: open_state(path) for name, path in recipe.inputs.items()}
    results: dict[str, LazyState] = {}
    for name, step in recipe.steps.items():
        try:
            results[name] = _planned(step, {**inputs, **results}, folder)
        except SurgeryError as error:
            raise SurgeryError(f"step {name!r}: {error}") from None
    for path, name in recipe.outputs.items():
        if name not in results and name not in inputs:
            raise SurgeryError(f"output {path.name}: there is no step {name!r}")
    return inputs, results


def _planned(step: Mapping[str, Any], known: Mapping[str, LazyState], folder: Path) -> LazyState:
    do = step["do"]
    if do not in OPERATIONS:
        raise SurgeryError(f"unknown operation {do!r}: choose one of {', '.join(OPERATIONS)}")
    takes = inspect.signature(OPERATIONS[do]).parameters
    given = {name: value for name, value in step.items() if name != "do"}
    if odd := [name for name in given if name not in takes]:
        raise SurgeryError(f"{do} takes no {odd[0]!r}, but {', '.join(takes)}")
    if lacking := [name for name, p in takes.items() if p.default is p.empty and name not in given]:
        raise SurgeryError(f"{do} needs {lacking[0]!r}")

    def find(value: Any) -> Any:
        if isinstance(value, float | int | None):
            raise SurgeryError(f"{do} takes names of inputs and steps, got {value!r}")
        if isinstance(value, list):
            return [find(one) for one in value]
        if isinstance(value, dict):
            return {pattern: find(one) for pattern, one in value.items()}
        if value not in known:
            raise SurgeryError(f"{value!r} is no input and no earlier step; there are {', '.join(known)}")
        return known[value]

    for name in _STATES:
        if name in given:
            given[name] = find(given[name])
    if "plan" in given:
        given["plan"] = folder / str(given["plan"])
        if not given["plan"].is_file():
            raise SurgeryError(f"there is no plan {given['plan']}")
    return OPERATIONS[do](**given)
