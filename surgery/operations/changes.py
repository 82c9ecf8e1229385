"""Operations on one checkpoint: each takes a subject and gives the subject that it becomes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from surgery.depth.graft import graft as graft_model
from surgery.depth.ungraft import ungraft as ungraft_model
from surgery.errors import SurgeryError
from surgery.lazy import cast as cast_values
from surgery.lazy import metas
from surgery.merge.driver import switch
from surgery.operations.given import choice, number, plan_of, share, texts, whole
from surgery.operations.subject import Subject
from surgery.operations.texts import shown
from surgery.plan import Submodel
from surgery.states import state
from surgery.width.importance import importance
from surgery.width.narrow import narrow as narrow_model
from surgery.width.target import Target
from surgery.width.widen import widen as widen_model

SCORES = ("l1", "l2", "bn_scale")
"""How important a position is: by the norm of its weights, or by batch norms' scales."""


def narrow(
    model: Subject, *, rate: float, keep: Sequence[str] = (), heads: str = "inside", strict: bool = False
) -> Subject:
    """Keep the first positions of every hidden width."""
    settings = {
        "rate": share("rate", rate),
        "keep": texts("keep", keep),
        "heads": choice("heads", heads, ("inside", "drop")),
        "strict": switch("strict", strict),
    }
    small, plan = narrow_model(model.built(), example=model.example(), **settings)
    return model.becomes(plan.extract(model.values), small, plan)


def prune(model: Subject, *, macs: float | None = None, parameters: float | None = None, by: str = "l1") -> Subject:
    """Keep the most important positions of all widths, down to a size. The weights are read."""
    if (macs is None) == (parameters is None):
        raise SurgeryError("prune needs a size: give the share of macs or of parameters to keep, one of the two")
    size = {"macs": share("macs", macs)} if parameters is None else {"parameters": share("parameters", parameters)}
    by = choice("by", by, SCORES)
    net, example = model.loaded(), model.example()
    scores = importance(net, example=example, by=by)
    small, plan = narrow_model(net, target=Target(**size), keep_top=scores, example=example)
    return model.becomes(plan.extract(model.values), small, plan)


def graft(model: Subject, *, depths: Any) -> Subject:
    """Repeat the last blocks of sections."""
    return _at_depth(model, graft_model, lambda plan, values: plan.embed(values)[0], depths=depths)


def ungraft(model: Subject, *, keep: Any) -> Subject:
    """Keep the first blocks of sections."""
    return _at_depth(model, ungraft_model, Submodel.extract, keep=keep)


def _at_depth(model: Subject, change: Callable, by_plan: Callable, **depths: Any) -> Subject:
    """Change the model, or where it is not known, what the names of its tensors show of it."""
    ((name, value),) = depths.items()
    if not isinstance(value, list | tuple | dict):
        raise SurgeryError(f"{name}={shown(value)}: give a number of blocks for each section, such as [2, 2]")
    if model.described:
        changed, plan = change(model.built(), example=model.example(), **depths)
    else:
        (_, plan), changed = change(metas(model.values), **depths), None
    return model.becomes(by_plan(plan, model.values), changed, plan)


def widen(
    model: Subject,
    *,
    rate: float,
    mode: str = "copy",
    noise: float = 0.0,
    seed: int = 0,
    keep: Sequence[str] = (),
    heads: str = "drop",
    strict: bool = False,
) -> Subject:
    """Make every hidden width wider; the outputs stay. The weights are read, and the wide model is held in memory.

    The plan of what it becomes cuts the old model out of it.
    """
    settings = {
        "rate": number("rate", rate),
        "mode": choice("mode", mode, ("copy", "zero")),
        "keep": texts("keep", keep),
        "heads": choice("heads", heads, ("inside", "drop")),
        "noise": number("noise", noise),
        "generator": torch.Generator().manual_seed(whole("seed", seed)),
        "strict": switch("strict", strict),
    }
    wide, plan = widen_model(model.loaded(), example=model.example(), **settings)
    dtypes = metas(model.values)
    return model.becomes({name: t.to(dtypes[name].dtype) for name, t in state(wide).items()}, wide, plan)


def extract(model: Subject, *, plan: Path) -> Subject:
    """Cut a small model out as a plan says."""
    found = plan_of(plan)
    small = found.build(model.built()) if model.described else None
    return model.becomes(found.extract(model.values), small, found)


def embed(model: Subject, *, plan: Path, into: Subject | None = None) -> Subject:
    """Lay a small model back into the large one: into its values where they are given, otherwise into zeros."""
    found = plan_of(plan)
    if into is None:
        return Subject(found.embed(model.values)[0], "the result", shape=model.shape, plan=found)
    full = into.built() if into.described else None
    return into.becomes(found.embed(model.values, into=into.values)[0], full, found)


def cast(model: Subject, *, dtype: str) -> Subject:
    """The same in another floating-point type."""
    found = getattr(torch, str(dtype), None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise SurgeryError(f"dtype={shown(dtype)}: give a floating-point type of torch, such as float32 or bfloat16")
    return model.alike(cast_values(model.values, found), model.plan)
