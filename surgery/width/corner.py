"""Narrowing by reference: the smaller model of a family is the leading corner of the larger one."""

import copy
from typing import Any

from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.forward import named_tensors
from surgery.names import joined
from surgery.plan import Index, Source, Submodel, structure
from surgery.states import load, owners, state

_OWN = vars(nn.Module()).keys() - {"training"}  # what every module keeps for itself


def corner(model: nn.Module, small: nn.Module) -> tuple[nn.Module, Submodel]:
    """A copy of `small` with the leading corner of the model's weights, and the plan. No forward pass is run.

    Args:
        model: any module; it is not changed.
        small: a smaller model of the same family, with the same names of tensors.

    Returns:
        The copy, and the plan that maps its state to the model's.

    Raises:
        SurgeryError: if the two differ in their tensors' names (in depth, say), or `small` is larger somewhere.

    >>> net, half = nn.Linear(4, 2), nn.Linear(2, 2)
    >>> small, plan = corner(net, half)
    >>> bool((small.weight == net.weight[:, :2]).all()), plan.entries["weight"][0].index
    (True, (None, ((0, 2),)))
    """
    full, values = state(model), state(small)
    names = [n for n in (*full, *values) if n not in full or n not in values]
    if names:
        where = "large" if names[0] in full else "small"
        raise SurgeryError(
            f"only the {where} model has a tensor {names[0]!r}: give both the same depth first, with graft or ungraft"
        )
    entries = {name: (Source(name, _leading(name, tensor, full[name])),) for name, tensor in values.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
    dtypes = {name: tensor.dtype for name, tensor in full.items()}
    plan = Submodel(entries, shapes, (*_attributes(model, small), *_slices(model, small)), structure(model), dtypes)
    result = copy.deepcopy(small)
    if all(tensor.is_meta for tensor in (*full.values(), *values.values())):
        return result, plan
    return load(result, plan.extract(full)), plan


def _leading(name: str, small: Tensor, full: Tensor) -> Index:
    if small.ndim != full.ndim or any(s > f for s, f in zip(small.shape, full.shape)):
        raise SurgeryError(
            f"{name!r} has shape {tuple(small.shape)} in the small model and {tuple(full.shape)} in the large one, of "
            "which it is no leading corner"
        )
    return tuple(None if s == f else ((0, s),) for s, f in zip(small.shape, full.shape))


def _attributes(model: nn.Module, small: nn.Module) -> list[dict[str, Any]]:
    """Edits for plain attributes in which the two differ."""
    edits = []
    others = dict(small.named_modules())
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            new = vars(others[name]).get(attribute, value) if name in others else value
            if attribute in _OWN or not _is_json(value) or not _is_json(new) or new == value:
                continue
            edits.append({"do": "set", "module": name, "attribute": attribute, "value": new})
    return edits


def _is_json(value: Any) -> bool:
    """Whether an edit may carry a value."""
    if isinstance(value, list | tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, int | float | str | bool)


def _slices(model: nn.Module, small: nn.Module) -> list[dict[str, Any]]:
    """Edits for tensors that are not in the state."""
    edits = []
    others = dict(named_tensors(small))
    held = {id(tensor) for _, _, own in owners(model) for tensor in own.values()}  # under all their names
    for (module, attribute), tensor in named_tensors(model):
        other = others.get((module, attribute), tensor)
        if id(tensor) not in held and other.shape != tensor.shape:
            index = _leading(joined(module, attribute), other, tensor)
            edits.append({"do": "slice", "module": module, "attribute": attribute, "index": index})
    return edits
