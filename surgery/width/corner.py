"""Narrowing by reference: the smaller model of a family is the leading corner of the larger one."""

import copy
from typing import Any

from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.forward import named_tensors
from surgery.state import load, owners, state
from surgery.submodel import Index, Source, Submodel, structure

_OWN = vars(nn.Module()).keys() - {"training"}  # what every module keeps for itself


def corner(model: nn.Module, like: nn.Module) -> tuple[nn.Module, Submodel]:
    """(a copy of `like` with the leading corner of the model's weights, the plan). Needs no forward pass.

    Raises SurgeryError if the two differ in their tensors' names (in depth, say) or `like` is larger somewhere.
    """
    full, small = state(model), state(like)
    names = [n for n in (*full, *small) if n not in full or n not in small]
    if names:
        where = "the model" if names[0] in full else "`like`"
        raise SurgeryError(f"only {where} has a tensor {names[0]!r}: equal the depths first, with graft or ungraft")
    entries = {}
    for name, tensor in small.items():
        entries[name] = (Source(name, _leading(name, tensor, full[name])),)
    shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
    plan = Submodel(entries, shapes, (*_attributes(model, like), *_slices(model, like)), structure(model))
    narrow = copy.deepcopy(like)
    if all(tensor.is_meta for tensor in (*full.values(), *small.values())):
        return narrow, plan
    return load(narrow, plan.extract(full)), plan


def _leading(name: str, small: Tensor, full: Tensor) -> Index:
    if small.ndim != full.ndim or any(s > f for s, f in zip(small.shape, full.shape)):
        raise SurgeryError(
            f"{name!r} has shape {tuple(small.shape)} in `like` and {tuple(full.shape)} in the model: no leading corner"
        )
    return tuple(None if s == f else ((0, s),) for s, f in zip(small.shape, full.shape))


def _attributes(model: nn.Module, like: nn.Module) -> list[dict[str, Any]]:
    """Edits for plain attributes in which the two differ."""
    edits = []
    others = dict(like.named_modules())
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            new = vars(others[name]).get(attribute, value) if name in others else value
            if attribute in _OWN or not _plain(value) or not _plain(new) or new == value:
                continue
            edits.append({"do": "set", "module": name, "attribute": attribute, "value": new})
    return edits


def _plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_plain, value))
    return value is None or isinstance(value, int | float | str | bool)


def _slices(model: nn.Module, like: nn.Module) -> list[dict[str, Any]]:
    """Edits for tensors that no state holds."""
    edits = []
    others = dict(named_tensors(like))
    held = {id(tensor) for _, _, own in owners(model) for tensor in own.values()}  # under all their names
    for (module, attribute), tensor in named_tensors(model):
        name = f"{module}.{attribute}" if module else attribute
        small = others.get((module, attribute), tensor)
        if id(tensor) not in held and small.shape != tensor.shape:
            index = _leading(name, small, tensor)
            edits.append({"do": "slice", "module": module, "attribute": attribute, "index": index})
    return edits
