"""Operations that put the positions of widths in another order: what the model computes stays."""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from surgery.copying import clone
from surgery.errors import SurgeryError, first_line
from surgery.merge.driver import switch
from surgery.operations.changes import SCORES
from surgery.operations.given import choice, function_of, plan_of
from surgery.operations.models import state_for
from surgery.operations.subject import Subject
from surgery.plan import Submodel
from surgery.plan.positions import positions
from surgery.states import load
from surgery.width.align import Aligner
from surgery.width.importance import importance
from surgery.width.narrow import widths
from surgery.width.permute import permute as permute_model
from surgery.width.permute import sort_by as sort_model

_log = logging.getLogger(__name__)
_LARGEST = 2**28  # bytes of a file of permutations


def permute(
    model: Subject, *, permutations: Path | None = None, sort_by: str | None = None, inverse: bool = False
) -> Subject:
    """Put widths in the order that a file says, or in that of how important their positions are.

    Args:
        permutations: a JSON file with the present positions in their new order by the name of a width, as
            `surgery.permute` takes them, or a plan that permutes, for which the model is not needed.
        sort_by: a criterion of `surgery.importance`; the most important positions come first. The weights are read.
        inverse: undo what the file says.
    """
    if (permutations is None) == (sort_by is None):
        raise SurgeryError("permute needs an order: give a file of permutations, or sort_by, one of the two")
    if switch("inverse", inverse) and sort_by is not None:
        raise SurgeryError("inverse undoes the permutations of a file: give the plan that was saved when sorting")
    if sort_by is not None:
        choice("sort_by", sort_by, SCORES)
        net, example = model.loaded(), model.example()
        scores = importance(net, example=example, by=sort_by)
        scores = _without(_beyond(net, example), scores)
        return _ordered(model, *sort_model(net, scores, example=example))
    found = _read(permutations)
    if isinstance(found, Submodel):
        if model.described:
            model.built()  # brings tied tensors under one name
        return model.alike(found.embed(model.values)[0] if inverse else found.extract(model.values), found)
    try:
        orders = {name: _inverse(order) if inverse else order for name, order in found.items()}
        return _ordered(model, *permute_model(model.built(), orders, example=model.example()))
    except SurgeryError as error:
        raise SurgeryError(f"{permutations}: {error}") from None


def align(model: Subject, *, to: Subject, by: str = "weights", data: str | None = None) -> Subject:
    """Put widths in the order in which they match another model's of the same architecture. All weights are read.

    Args:
        by: `weights` or `activations`, as for `surgery.align`.
        data: for activations, module:function, which gives batches of inputs.
    """
    choice("by", by, ("weights", "activations"))
    if (by == "activations") != (data is not None):
        need = "needs data, module:function that gives batches of inputs" if data is None else "takes no data"
        raise SurgeryError(f"to align by {by} {need}")
    own = model.loaded()
    other = dict(state_for(own, to.values, to.what))
    try:
        reference = load(clone(own), other)
    except SurgeryError as error:
        raise SurgeryError(f"{to.what} is no model of the same architecture as {model.what}: {error}") from None
    example = model.example()
    aligner = Aligner(reference, example=example)
    if by == "weights":
        orders = aligner.by_weights(reference, own)
    else:
        orders = aligner.by_activations(reference, own, batches_of(data))
    moved = {name: order for name, order in orders.items() if order.tolist() != list(range(len(order)))}
    plan = aligner.plan(_without(_beyond(own, example), moved))
    return _ordered(model, plan.build(own), plan)


def batches_of(data: str) -> list[Any]:
    """What a function of the user's own gives one after another."""
    found = function_of(data, "data")()
    if not isinstance(found, Iterable):
        raise SurgeryError(f"data {data} gives a {type(found).__name__}, and should give batches one after another")
    return list(found)


def _beyond(model: nn.Module, example: Any) -> dict[str, str]:
    """The widths along which a tensor lies that no checkpoint holds, by name, with that tensor.

    The model's class would make such a tensor anew, in the old order (the frequencies of rotary positions, say).
    """
    kept = model.state_dict()
    found = {}
    for width in widths(model, example=example):
        if outside := [name for name, _ in width.members if name not in kept]:
            found[width.name] = outside[0]
    return found


def _without(beyond: Mapping[str, str], orders: Mapping[str, Any]) -> dict[str, Any]:
    """The orders, or scores, of widths that may be put in another order in a checkpoint; the others are logged."""
    left = [name for name in orders if name in beyond]
    if left:
        more = f" (and {len(left) - 1} more widths)" if len(left) > 1 else ""
        why = "the model's class makes that tensor anew, and no checkpoint holds it"
        _log.warning("the positions along %s%s keep their order: %s", beyond[left[0]], more, why)
    return {name: value for name, value in orders.items() if name not in beyond}


def _ordered(model: Subject, module: Any, plan: Submodel) -> Subject:
    if plan.edits:  # the model's class would make these anew, in the old order
        edit = plan.edits[0]
        raise SurgeryError(
            f"{edit['module'] or 'the model'} keeps a tensor {edit['attribute']!r} along a width that was to get "
            "another order, and a checkpoint does not hold it: leave that width out, or use surgery.permute in Python"
        )
    return model.becomes(plan.extract(model.values), module, plan)


def _read(path: Path) -> Submodel | dict[str, Any]:
    """A plan that permutes, or orders by width."""
    try:
        if path.stat().st_size > _LARGEST:
            raise SurgeryError(f"{path} is too large for a file of permutations")
        found = json.loads(path.read_text())
    except OSError as error:
        raise SurgeryError(f"{path} cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise SurgeryError(f"{path} is no JSON: {first_line(error)}") from None
    if not isinstance(found, dict):
        raise SurgeryError(f'{path} holds no permutations by width, such as {{"fc1.weight:0": [2, 0, 1]}}')
    if "format" not in found and "entries" not in found:
        return found
    plan = plan_of(path)
    if odd := [name for name in plan.shapes if not _is_permutation(plan, name)]:
        raise SurgeryError(f"{path} is a plan that does more to {odd[0]!r} than permute it: use extract or embed")
    if plan.edits:
        raise SurgeryError(f"{path} is a plan that also changes the model's attributes: use surgery.permute in Python")
    return plan


def _is_permutation(plan: Submodel, name: str) -> bool:
    sources = plan.entries.get(name, ())
    if set(plan.entries) != set(plan.shapes) or [source.name for source in sources] != [name]:
        return False
    sizes = plan.shapes[name]
    return all(
        runs is None or sorted(positions(runs)) == list(range(size)) for runs, size in zip(sources[0].index, sizes)
    )


def _inverse(order: Any) -> Any:
    """The permutation that undoes another; what is none is left to `surgery.permute`, which refuses it."""
    if not isinstance(order, list) or not all(type(one) is int for one in order):
        return order
    return sorted(range(len(order)), key=order.__getitem__) if sorted(order) == list(range(len(order))) else order
