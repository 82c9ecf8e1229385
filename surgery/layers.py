"""Decomposition of a network into the pieces that surgery moves around."""

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from surgery.errors import SurgeryError
from surgery.state import state

Unit: TypeAlias = Literal["layer", "block", "tensor"]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class Layer(NamedTuple):
    """A piece of a network: its module's name, its kind and the state names of the tensors that it owns."""

    name: str
    kind: str
    tensors: tuple[str, ...]


def layers(model: nn.Module, unit: Unit = "layer") -> list[Layer]:
    """Decompose a model into layers that together hold every tensor of `surgery.state(model)` exactly once.

    Args:
        model: any module; no forward pass is run, meta tensors will do.
        unit: what counts as one piece.
            `layer`: a module that owns tensors, with all that it owns: weight, bias, norm statistics. A
            module that has children and tensors of its own (a position embedding, a class token) gives
            those tensors as one more layer; a parametrized module (weight norm) stays whole.
            `block`: a residual block is one piece, whatever lies outside of blocks is as for `layer`.
            A block is a member of a run: a Sequential, ModuleList or ModuleDict in which two neighbours
            of one class, or all members, are composite (own several layers) and are not containers
            themselves; runs that lie deepest win.
            `tensor`: each entry of the state on its own.

    Returns:
        Layers in registration order. A tensor that several modules share belongs to the first.

    Raises:
        SurgeryError: if the unit is unknown, or is `block` and the model has none.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    >>> for layer in layers(net): print(layer.name, layer.kind, len(layer.tensors))
    0 Linear 2
    1 BatchNorm1d 5
    3 Linear 2
    """
    values = state(model)
    if unit == "tensor":
        return [Layer(name, "tensor", (name,)) for name in values]
    if unit not in ("layer", "block"):
        raise SurgeryError(f"unknown unit {unit!r}: choose layer, block or tensor")
    whole = _blocks(model) if unit == "block" else {}
    if unit == "block" and not whole:
        raise SurgeryError(f"{type(model).__name__} has no residual blocks: use unit='layer'")
    result = []
    free = dict.fromkeys(values)
    for name, module, names in _owners(model, set(whole)):
        if mine := tuple(n for n in names if n in free):
            for n in mine:
                del free[n]
            result.append(Layer(name, type(module).__name__, mine))
    if free:
        raise SurgeryError(
            f"no module owns {next(iter(free))!r}: {type(model).__name__} has a custom state dict; use unit='tensor'"
        )
    return result


def _owners(model: nn.Module, whole: set[str]) -> Iterator[tuple[str, nn.Module, list[str]]]:
    """(module name, module, state names it owns): whole modules with all inside, others with their own tensors."""
    inside: str | None = None
    for name, module in model.named_modules():
        if inside is not None and name.startswith(inside):
            continue
        inside = None
        prefix = f"{name}." if name else ""
        if name in whole or is_parametrized(module):
            inside = prefix
            yield name, module, [prefix + n for n in _state_names(module)]
        else:
            yield name, module, [prefix + n for n in _state_names(module) if "." not in n]


def _state_names(module: nn.Module) -> list[str]:
    return [name for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)]


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The residual blocks of a model: members of the deepest runs, by name."""
    found = {}
    for name, module in model.named_modules():
        if _is_run(module):
            prefix = f"{name}." if name else ""
            for child_name, child in module.named_children():
                if _is_composite(child) and not any(_is_run(m) for m in child.modules()):
                    found[prefix + child_name] = child
    return found


def _is_run(module: nn.Module) -> bool:
    if not isinstance(module, _CONTAINERS):
        return False
    members = [child for child in module.children() if _state_names(child)]
    composite = [_is_composite(child) for child in members]
    twins = any(
        a and b and type(left) is type(right)
        for a, b, left, right in zip(composite, composite[1:], members, members[1:])
    )
    return twins or (bool(members) and all(composite))


def _is_composite(module: nn.Module) -> bool:
    """Owns several layers and is no container."""
    if isinstance(module, _CONTAINERS):
        return False
    return sum(any("." not in n for n in _state_names(m)) for m in module.modules()) > 1
