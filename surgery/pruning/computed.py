"""Read weights computed from parameters: by masks, norms, or an adapter.

A copy of the model adds a tensor of zeros to each such weight. The zeros have the weight's axes and its gradient,
whatever computes the weight.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from surgery.copying import clone, plain_tensors
from surgery.errors import explain
from surgery.forward import call, copy_tensors, in_mode
from surgery.names import is_inside, join
from surgery.width.solve import Atom, Solution, atoms, named_widths

Key = tuple[str, str]
_ADDED = "_zeros_added"


class ComputedWeights(NamedTuple):
    """A model whose weights can be read as its forward pass uses them.

    Attributes:
        model: the model, or a copy with zeros added to computed weights.
        keys: from each computed weight (module name, attribute name) to the tensor of `model` that has its axes and
            gradient: the zeros; for a layer with an adapter, the base's weight.
        values: the value of each computed weight.
        ratios: the factor from this tensor's gradient to the computed weight's, where it is not 1.
        parts: from a parameter (module name, attribute name) to the weight that is computed from it.
    """

    model: nn.Module
    keys: dict[Key, Key]
    values: dict[Key, Tensor]
    ratios: dict[Key, Tensor]
    parts: dict[Key, Key]

    @property
    def added(self) -> set[Key]:
        """The keys of the zeros."""
        return {tensor for key, tensor in self.keys.items() if tensor != key}

    def names(self, solution: Solution) -> dict[str, Atom]:
        """Name the widths of the model, as `named_widths` does without zeros."""
        members = {
            atom: [place for place in places if place[0] not in self.added] for atom, places in solution.members.items()
        }
        return named_widths(replace(solution, members={atom: places for atom, places in members.items() if places}))

    def solution(self, solution: Solution) -> Solution:
        """Return a solution with computed weights in place of their parameters."""
        tensors, members = {}, {}
        for key, axes in solution.tensors.items():
            if key in self.keys or key not in self.added | self.parts.keys():
                tensors[key] = axes
            elif key in self.parts:
                tensors[self.parts[key]] = ()
        tensors |= {key: solution.tensors[tensor] for key, tensor in self.keys.items()}
        for key, axes in tensors.items():
            for position, axis in enumerate(axes):
                for atom in dict.fromkeys(atoms(axis)):
                    members.setdefault(atom, []).append((key, position))
        return replace(solution, tensors=tensors, members=members)


def as_parameters(layer: nn.Module, name: str, weights: ComputedWeights) -> Any:
    """Return a layer, or a copy that holds its computed weights as parameters."""
    values = {attribute: value for (module, attribute), value in weights.values.items() if module == name}
    if not values:
        return layer
    layer = clone(layer)
    if parametrize.is_parametrized(layer):  # torch's function to remove them changes the class, which copies share
        del layer._modules["parametrizations"]
        layer.__class__ = type(layer).__base__
    for attribute, value in values.items():
        layer.__dict__.pop(attribute, None)
        setattr(layer, attribute, nn.Parameter(value, requires_grad=False))
    return layer


class _Zeros(nn.Module):
    """A parametrization that adds zeros."""

    def __init__(self, weight: Tensor):
        super().__init__()
        self.zeros = nn.Parameter(torch.zeros_like(weight))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.zeros


class _Add:
    """A hook that adds zeros to a weight that other hooks have computed."""

    def __init__(self, attribute: str):
        self.attribute = attribute

    def __call__(self, module: nn.Module, args: Any) -> None:
        zeros = module._parameters[self.attribute + _ADDED]
        setattr(module, self.attribute, getattr(module, self.attribute) + zeros)


def find_computed(model: nn.Module, example: Any) -> ComputedWeights:
    """Find a model's weights that are computed from parameters."""
    hooked, parametrized = dict(_find_hooked(model)), dict(_find_parametrized(model))
    adapters = [(name, module) for name, module in model.named_modules() if _is_adapted(module)]
    result = ComputedWeights(model, {}, {}, {}, {})
    if not hooked and not parametrized and not adapters:
        return result
    twin = clone(model)
    layer: Any
    for (name, attribute), parts in hooked.items():
        layer = twin.get_submodule(name)
        layer.register_parameter(attribute + _ADDED, nn.Parameter(torch.zeros_like(getattr(layer, attribute))))
        layer.register_forward_pre_hook(_Add(attribute))
        result.keys[name, attribute] = name, attribute + _ADDED
        result.parts.update(dict.fromkeys(parts, (name, attribute)))
    for (name, attribute), parts in parametrized.items():
        layer = twin.get_submodule(name)
        with torch.no_grad():
            zeros = _Zeros(getattr(layer, attribute))
        parametrize.register_parametrization(layer, attribute, zeros, unsafe=True)
        last = len(layer.parametrizations[attribute]) - 1
        result.keys[name, attribute] = join(name, f"parametrizations.{attribute}.{last}"), "zeros"
        result.parts.update(dict.fromkeys(parts, (name, attribute)))
    with in_mode(twin, training=False):
        if hooked:  # hooks compute their weights in a forward pass
            with explain(f"{type(model).__name__} does not run on the example"):
                call(twin, copy_tensors(example))
        for name, attribute in result.keys:
            result.values[name, attribute] = getattr(twin.get_submodule(name), attribute).detach()
        for name, _ in adapters:
            key = join(name, "base_layer"), "weight"
            total, weight = _with_adapter(twin.get_submodule(name))
            result.keys.setdefault(key, key)  # a base may be parametrized itself
            result.values[key] = weight.detach()
            if total is not weight:
                result.ratios[key] = (total / weight).nan_to_num(0, 0, 0).detach()
            inner = (n for n, _ in model.get_submodule(name).named_parameters() if not is_inside(n, "base_layer"))
            keys = (join(name, n).rpartition(".") for n in inner)
            result.parts.update({(module, attribute): key for module, _, attribute in keys})
    return result._replace(model=twin)


def _find_hooked(model: nn.Module) -> Iterator[tuple[Key, list[Key]]]:
    """Yield the weights that hooks compute, and their parameters.

    Such hooks are the masks of torch's prune, and the old weight_norm and spectral_norm.
    """
    for name, module in model.named_modules():
        for attribute, tensor in plain_tensors(module).items():
            parts = {n: p for n, p in module._parameters.items() if p is not None and n.startswith(f"{attribute}_")}
            if any(p.shape == tensor.shape for p in parts.values()):
                yield (name, attribute), [(name, part) for part in parts]


def _find_parametrized(model: nn.Module) -> Iterator[tuple[Key, list[Key]]]:
    """Yield the weights that parametrizations compute, and their parameters."""
    for name, module in model.named_modules():
        for attribute in module.parametrizations if parametrize.is_parametrized(module) else ():
            inside = join(name, f"parametrizations.{attribute}")
            inner = (join(inside, n).rpartition(".") for n, _ in module.parametrizations[attribute].named_parameters())
            yield (name, attribute), [(owner, part) for owner, _, part in inner]


def _is_adapted(module: Any) -> bool:
    """Return whether a module is a layer with an adapter of surgery.adapters or peft."""
    if not isinstance(getattr(module, "base_layer", None), nn.Module):
        return False
    weight = getattr(module.base_layer, "weight", None)
    if not isinstance(weight, Tensor) or not weight.is_floating_point():
        return False
    return hasattr(module, "change") or (hasattr(module, "lora_A") and not (module.merged or module.disable_adapters))


def _with_adapter(layer: Any) -> tuple[Tensor, Tensor]:
    """Return the sum of a layer's weight and its adapter's product, and the result."""
    before = layer.base_layer.weight
    if hasattr(layer, "change"):
        from surgery.adapters.layer import add_change, is_transposed  # a model that has such a layer has imported it

        total = add_change(before, layer.change())
        magnitude, turned = layer.lora_magnitude_vector, is_transposed(layer.base_layer)
        return total, total if magnitude is None else add_change(before, layer.change(), magnitude, turned)
    used = [name for name in layer.active_adapters if name in layer.lora_A or name in layer.lora_embedding_A]
    total = before + sum(layer.get_delta_weight(name) for name in used)
    if not any(getattr(layer, "use_dora", {}).get(name) for name in used):
        return total, total
    merged: Any = clone(layer)
    merged.merge()
    return total, merged.base_layer.weight
