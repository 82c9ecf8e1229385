"""Edits: the changes of a full module into a small one, besides smaller tensors.

An edit is a JSON object: `do` names one of the functions below, the rest are its arguments.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surgery.depth.tree import Chain, Skip
from surgery.errors import SurgeryError
from surgery.forward import named_tensors
from surgery.names import join
from surgery.plain import is_like, is_plain
from surgery.plan.positions import as_index, shape_at, take


def apply_edit(model: nn.Module, edit: Mapping[str, Any]) -> None:
    """Carry out one edit on the module, in place."""
    arguments = {key: value for key, value in edit.items() if key != "do"}
    try:
        _EDITS[edit["do"]](model, **arguments)
    except SurgeryError:
        raise
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SurgeryError(f"{dict(edit)} does not fit this {type(model).__name__}: {error!r}", code="plan") from error


def set_attribute(model: nn.Module, module: str, attribute: str, value: Any) -> None:
    """Set a plain attribute of a module.

    A tuple stays a tuple, although JSON has lists only. The attribute may belong to an object in the module, such as
    `config.num_hidden_layers`.
    """
    path, _, last = attribute.rpartition(".")
    holder = _child(model, module)
    owner = functools.reduce(_read_stored, path.split("."), holder) if path else holder
    _refuse_unless_plain(holder, module, attribute, value)
    setattr(owner, last, _like(_read_stored(owner, last), value))


def _child(model: nn.Module, name: str) -> Any:
    """Return a module by its name, in a tenth of the time of `get_submodule`."""
    return functools.reduce(lambda module, part: module._modules[part], name.split(".") if name else (), model)


def _refuse_unless_plain(owner: nn.Module, module: str, attribute: str, value: Any) -> None:
    """Raise SurgeryError unless an attribute is plain, before and after.

    It may be of a module or of its configuration. Plans come from files: they may change sizes, heads, scales and
    settings, but no code and no tensor.
    """

    def refused(why: str, to: bool = False) -> SurgeryError:
        where, becomes = f"module {module!r}" if module else "the model", f" to {value!r}" if to else ""
        return SurgeryError(f"the plan sets {attribute!r} of {where}{becomes}{why}", code="plan")

    *path, last = attribute.split(".")
    for name in path:
        owner = vars(owner).get(name)
        if owner is None or isinstance(owner, nn.Module | Tensor | type) or callable(owner) or is_plain(owner):
            raise refused(f", but {name!r} is no configuration there: the plan is not of this model")
    if last in _TORCH_ATTRIBUTES and isinstance(owner, nn.Module):
        raise refused(", which torch keeps there for itself: the plan was not made by this package")
    kind = getattr(type(owner), last, None)
    stored = last in vars(owner) or (isinstance(kind, property) and kind.fset is not None)
    if last.startswith("__") or not stored or not is_plain(old := _read_stored(owner, last)):
        raise refused(", which is no number, text or truth value there: the plan is not of this model")
    if not is_plain(value):
        raise refused(": an attribute becomes a number, a text, a truth value or a list of them", to=True)
    if not is_like(old, value):
        raise refused(f", which is no value like the {old!r} there: a plan changes values, not their kind", to=True)


_TORCH_ATTRIBUTES = vars(nn.Module()).keys()


def attribute_of(model: nn.Module, module: str, attribute: str) -> Any:
    """Return the value of an attribute that `set_attribute` sets."""
    return functools.reduce(_read_stored, attribute.split("."), model.get_submodule(module))


def _read_stored(owner: Any, name: str) -> Any:
    """Return an attribute from storage.

    A configuration may raise for one that differs between layers.
    """
    return vars(owner)[name] if name in vars(owner) else getattr(owner, name)


def slice_buffer(model: nn.Module, module: str, attribute: str, index: list) -> None:
    """Take positions, in any order, of a tensor that is not in the state.

    It is a non-persistent buffer or an attribute.
    """
    owner = model.get_submodule(module)
    tensor, ranges = getattr(owner, attribute), as_index(index)
    shape_at(join(module, attribute), ranges, tuple(tensor.shape))
    setattr(owner, attribute, take(tensor, ranges))


def fill(model: nn.Module, module: str, attribute: str, value: float) -> None:
    """Fill a tensor that is not in the state with a number, such as a width's scale."""
    tensor = getattr(model.get_submodule(module), attribute)
    if isinstance(tensor, nn.Parameter) or type(value) not in (int, float) or not math.isfinite(value):
        raise TypeError(f"{join(module, attribute)} is trained, or {value!r} is no number")
    filled = torch.full_like(tensor, value)
    for (owner, last), other in list(named_tensors(model)):  # the tensor may have several names
        if other is tensor:
            setattr(model.get_submodule(owner), last, filled)


def remove(model: nn.Module, module: str, first: int, count: int) -> None:
    """Remove `count` children of a container from `first` on; later ones move up."""
    parent = model.get_submodule(module)
    children = list(parent._modules.items())
    remaining = [child for _, child in (*children[:first], *children[first + count :])]
    names = [name for name, _ in children]
    numbered = names == [str(i) for i in range(len(names))]
    names = names[: len(remaining)] if numbered else [*names[:first], *names[first + count :]]
    parent._modules.clear()
    parent._modules.update(zip(names, remaining))


def skip(model: nn.Module, module: str) -> None:
    """Replace a module by `Skip`."""
    model.set_submodule(module, Skip(), strict=True)


def unchain(model: nn.Module, module: str, keep: int) -> None:
    """Keep the first `keep` blocks of a `Chain`; if one is left it replaces the chain."""
    chain = model.get_submodule(module)
    if not isinstance(chain, Chain):
        raise TypeError(f"{module!r} is a {type(chain).__name__}, not a Chain")
    blocks = chain[0] if keep == 1 else chain[:keep]
    if keep > 1:
        blocks.training = chain.training
    model.set_submodule(module, blocks, strict=True)


_EDITS: dict[str, Callable[..., None]] = {
    "set": set_attribute,
    "slice": slice_buffer,
    "fill": fill,
    "remove": remove,
    "skip": skip,
    "unchain": unchain,
}


KEEP_NAMES = {"set", "slice", "fill"}
"""Edits after which a model has the same modules, and the same tensors in its state."""


def _like(old: Any, value: Any) -> Any:
    """Return the value with the container types of the old one."""
    if isinstance(value, list | tuple) and isinstance(old, list | tuple):
        items = [_like(o, v) for o, v in zip((*old, *value[len(old) :]), value)]
        return type(old)(*items) if hasattr(old, "_fields") else type(old)(items)
    return value
