"""The decomposition of a network into the pieces that surgery moves around."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from surgery.depth.sections import sections
from surgery.depth.tree import as_module
from surgery.errors import SurgeryError
from surgery.forward import Uses, call, in_mode, observe
from surgery.names import is_inside
from surgery.states import State, as_state, names_by_id, owners, state

Unit: TypeAlias = Literal["layer", "block", "tensor"]


class Layer(NamedTuple):
    """A piece of a network: its module's name, its kind, and its tensors' state names."""

    name: str
    kind: str
    tensors: tuple[str, ...]


def layers(model: nn.Module | State, *, example: Any = None, unit: Unit = "layer") -> list[Layer]:
    """Decompose a model into layers that together hold every tensor of its state once.

    Args:
        model: any module, or a state. A state's layers are the modules in its names, all of the kind "Part".
            Without an example no forward pass is run, and meta tensors are enough.
        unit: what counts as one piece.
            `layer`: a module that owns tensors, with everything that it owns: weight, bias, norm statistics. If a
            module with children also has tensors of its own (a position embedding, a class token), these are one more
            layer. The tensors of a parametrization (weight norm) belong to the module that it is for.
            `block`: a residual block (of `surgery.sections`) is one piece; outside of blocks it is as for `layer`.
            `tensor`: each entry of the state is a piece.
        example: an input (a tensor, a tuple of arguments or a dict of keyword arguments) for one forward pass in
            evaluation mode, which shows the order in which layers are used.

    Returns:
        With an example, layers in the order of their first use, unused ones last; otherwise in registration order. A
        tensor that several modules share belongs to the first of them.

    Raises:
        SurgeryError: if the unit is unknown, or is `block` and the model has no blocks; for an example with a state.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    >>> for layer in layers(net): print(layer.name, layer.kind, len(layer.tensors))
    0 Linear 2
    1 BatchNorm1d 5
    3 Linear 2
    """
    if example is not None and not isinstance(model, nn.Module):
        raise SurgeryError("a state cannot run on an example: give the module, or no example", code="argument")
    root = model if isinstance(model, nn.Module) else as_module(as_state(model, "what has layers"))
    pieces = _pieces(root, unit, example)
    if example is None:
        return pieces
    order = _first_use(root, example)
    return sorted(pieces, key=lambda piece: min(order.get(name, len(order)) for name in piece.tensors))


def _pieces(model: nn.Module, unit: Unit, example: Any) -> list[Layer]:
    """Return the layers in registration order."""
    values = state(model)
    if not isinstance(unit, str) or unit not in ("layer", "block", "tensor"):
        raise SurgeryError(f"unknown unit {str(unit)[:40]!r}: choose layer, block or tensor", code="argument")
    if unit == "tensor":
        return [Layer(name, "tensor", (name,)) for name in values]
    known = sections(model, example=example) if unit == "block" else []
    blocks = [block for section in known for block in section.blocks]
    if unit == "block" and not blocks:
        raise SurgeryError(f"{type(model).__name__} has no residual blocks: use unit='layer'", code="unsupported")
    modules = dict(model.named_modules())
    pieces: dict[str, list[str]] = {}
    for name, _, own_tensors in owners(model):
        name = _find_parametrized(name, modules)
        pieces.setdefault(next((block for block in blocks if is_inside(name, block)), name), []).extend(own_tensors)
    return [Layer(name, type(modules[name]).__name__, tuple(names)) for name, names in pieces.items()]


def check_segments(segments: Sequence[Sequence[str]], label: str = "segments") -> list[tuple[str, ...]]:
    """Return groups of tensor names as tuples; errors for other values name `label`.

    >>> check_segments([["a.weight", "a.bias"]])
    [('a.weight', 'a.bias')]
    """
    listed = isinstance(segments, list | tuple)
    if listed and any(isinstance(segment, Layer) for segment in segments):
        raise SurgeryError(f"{label} are names, not layers: call surgery.segments(layers) first", code="argument")
    if not listed or not all(
        isinstance(segment, list | tuple) and all(isinstance(name, str) for name in segment) for segment in segments
    ):
        raise SurgeryError(f"{label} are groups of tensors' names, see surgery.segments(layers)", code="argument")
    return [tuple(segment) for segment in segments]


def _first_use(model: nn.Module, example: Any) -> dict[str, int]:
    """Return each used tensor's rank of first use in a forward pass, by its name."""

    def watch(copy: nn.Module, inputs: Any) -> dict[str, int]:
        mode = Uses(names_by_id(copy))
        with in_mode(copy, training=False), mode:
            call(copy, inputs)
        return mode.order

    return observe(model, example, watch).found


def _find_parametrized(name: str, modules: dict[str, nn.Module]) -> str:
    """Return the module that a parametrization is for; other modules' names unchanged."""
    parts = name.split(".")
    if "parametrizations" in parts:
        owner = ".".join(parts[: parts.index("parametrizations")])
        if is_parametrized(modules[owner]):
            return owner
    return name
