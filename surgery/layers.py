"""Decomposition of a network into the pieces that surgery moves around."""

from typing import Literal, NamedTuple, TypeAlias

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from surgery.errors import SurgeryError
from surgery.state import owners, state

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
            those tensors as one more layer; what a parametrization (weight norm) keeps belongs to its module.
            `block`: a residual block is one piece, whatever lies outside of blocks is as for `layer`.
            A block is a member of a run: a Sequential, ModuleList or ModuleDict in which two neighbours
            of one class, or all members, are composite (own several layers) and are not containers
            themselves; runs that lie deepest win. (Where runs of convolution-norm pairs lie inside of residual
            blocks, as in LeViT, the pairs are what is found.)
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
    blocks = _blocks(model) if unit == "block" else {}
    if unit == "block" and not blocks:
        raise SurgeryError(f"{type(model).__name__} has no residual blocks: use unit='layer'")
    modules = dict(model.named_modules())
    pieces: dict[str, list[str]] = {}
    for name, _, own in owners(model):
        name = _parametrized(name, modules)
        parents = [block for block in blocks if name == block or name.startswith(f"{block}.")]
        pieces.setdefault(parents[0] if parents else name, []).extend(own)
    return [Layer(name, type(modules[name]).__name__, tuple(names)) for name, names in pieces.items()]


def _parametrized(name: str, modules: dict[str, nn.Module]) -> str:
    """The module that a parametrization's tensors belong to, or the name itself."""
    parts = name.split(".")
    if "parametrizations" in parts:
        owner = ".".join(parts[: parts.index("parametrizations")])
        if is_parametrized(modules[owner]):
            return owner
    return name


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
    members = [child for child in module.children() if _owning(child)]
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
    return _owning(module) > 1


def _owning(module: nn.Module) -> int:
    """How many modules in here own tensors."""
    return sum(1 for _ in owners(module))
