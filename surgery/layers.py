"""Decomposition of a network into the pieces that surgery moves around."""

from typing import Any, Literal, NamedTuple, TypeAlias

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import TorchDispatchMode

from surgery.depth.sections import sections
from surgery.errors import SurgeryError
from surgery.forward import in_mode, observed, run, tensors_in
from surgery.state import owners, state

Unit: TypeAlias = Literal["layer", "block", "tensor"]


class Layer(NamedTuple):
    """A piece of a network: its module's name, its kind and the state names of the tensors that it owns."""

    name: str
    kind: str
    tensors: tuple[str, ...]


def layers(model: nn.Module, example: Any = None, unit: Unit = "layer") -> list[Layer]:
    """Decompose a model into layers that together hold every tensor of `surgery.state(model)` exactly once.

    Args:
        model: any module; without an example no forward pass is run and meta tensors will do.
        unit: what counts as one piece.
            `layer`: a module that owns tensors, with all that it owns: weight, bias, norm statistics. A
            module that has children and tensors of its own (a position embedding, a class token) gives
            those tensors as one more layer; what a parametrization (weight norm) keeps belongs to its module.
            `block`: a residual block (of `surgery.sections`) is one piece, whatever lies outside of blocks is as
            for `layer`.
            `tensor`: each entry of the state on its own.
        example: an input (a tensor, a tuple of arguments or a dict of keyword arguments) for one forward pass in
            evaluation mode, which shows the order in which the layers are used.

    Returns:
        Layers in execution order (of their first use) if there is an example, those that were not used last; else in
        registration order. A tensor that several modules share belongs to the first of them.

    Raises:
        SurgeryError: if the unit is unknown, or is `block` and the model has none.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    >>> for layer in layers(net): print(layer.name, layer.kind, len(layer.tensors))
    0 Linear 2
    1 BatchNorm1d 5
    3 Linear 2
    """
    if isinstance(example, str):
        raise SurgeryError(f"the example is {example!r}: give a unit by name, unit={example!r}")
    pieces = _pieces(model, unit)
    if example is None:
        return pieces
    order = _first_use(model, example)
    return sorted(pieces, key=lambda piece: min(order.get(name, len(order)) for name in piece.tensors))


def _pieces(model: nn.Module, unit: Unit) -> list[Layer]:
    """The layers in registration order."""
    values = state(model)
    if unit == "tensor":
        return [Layer(name, "tensor", (name,)) for name in values]
    if unit not in ("layer", "block"):
        raise SurgeryError(f"unknown unit {str(unit)[:40]!r}: choose layer, block or tensor")
    blocks = [block for section in sections(model) for block in section.blocks] if unit == "block" else []
    if unit == "block" and not blocks:
        raise SurgeryError(f"{type(model).__name__} has no residual blocks: use unit='layer'")
    modules = dict(model.named_modules())
    pieces: dict[str, list[str]] = {}
    for name, _, own in owners(model):
        name = _parametrized(name, modules)
        parents = [block for block in blocks if name == block or name.startswith(f"{block}.")]
        pieces.setdefault(parents[0] if parents else name, []).extend(own)
    return [Layer(name, type(modules[name]).__name__, tuple(names)) for name, names in pieces.items()]


def _first_use(model: nn.Module, example: Any) -> dict[str, int]:
    """The rank of each tensor's first use in a forward pass, by state name; unused ones are left out."""

    def watch(copy: nn.Module, given: Any) -> dict[str, int]:
        mode = _Uses({id(tensor): name for _, _, own in owners(copy) for name, tensor in own.items()})
        with in_mode(copy, training=False), mode:
            run(copy, given)
        return mode.order

    order, _, _ = observed(model, example, watch)
    return order


class _Uses(TorchDispatchMode):
    def __init__(self, names: dict[int, str]):
        super().__init__()
        self.names, self.order = names, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for tensor in tensors_in((args, kwargs or {})):
            if id(tensor) in self.names:
                self.order.setdefault(self.names[id(tensor)], len(self.order))
        return func(*args, **(kwargs or {}))


def _parametrized(name: str, modules: dict[str, nn.Module]) -> str:
    """The module that a parametrization's tensors belong to, or the name itself."""
    parts = name.split(".")
    if "parametrizations" in parts:
        owner = ".".join(parts[: parts.index("parametrizations")])
        if is_parametrized(modules[owner]):
            return owner
    return name
