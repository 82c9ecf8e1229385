"""The attributes of torch's own modules: what they say in a narrower model."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from surgery.width.solved import Axis, Choice, Solution, digits, size_of


def known_edits(small: nn.Module, solution: Solution, choice: Choice) -> Iterator[dict[str, Any]]:
    """Edits after which the attributes of torch's own modules say what their tensors and operations are."""
    seen: dict[str, dict[str, Any]] = {}
    for step in solution.steps:
        ends = {"input": step.inputs[0] if step.inputs else (), "output": step.outputs[0] if step.outputs else ()}
        seen.setdefault(step.module, ends).update(step.numbers)
    for name, module in small.named_modules():
        values = next((found for kinds, found in _TRUE_VALUES if isinstance(module, kinds)), None)
        for attribute, value in values(module, seen.get(name, {}), choice).items() if values else ():
            if hasattr(module, attribute) and getattr(module, attribute) != value:
                yield {"do": "set", "module": name, "attribute": attribute, "value": value}


# The true values of a narrow module's attributes. `numbers` are its operation's arguments that are sizes of axes.


def _weight(module: nn.Module) -> Tensor:
    """The weight, or the parameter of its shape from which a hook makes it anew in every call: `torch.nn.utils`'
    weight_norm (weight_v), spectral_norm and prune (weight_orig). Until then the old weight lies beside it.
    """
    made_of = [module._parameters[name] for name in ("weight_v", "weight_orig") if name in module._parameters]
    return made_of[0] if made_of else module.weight


def _convolution(module: _ConvNd, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    groups = size_of(numbers["groups"], choice) if "groups" in numbers else module.groups
    first, second = _weight(module).shape[:2]
    if isinstance(module, _ConvTransposeNd):
        return {"groups": groups, "in_channels": first, "out_channels": second * groups}
    return {"groups": groups, "in_channels": second * groups, "out_channels": first}


def _linear(module: nn.Linear, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    outputs, inputs = _weight(module).shape
    return {"out_features": outputs, "in_features": inputs}


def _embedding(module: nn.Embedding, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    return {"num_embeddings": module.weight.shape[0], "embedding_dim": module.weight.shape[1]}


def _bilinear(module: nn.Bilinear, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    outputs, first, second = module.weight.shape
    return {"out_features": outputs, "in1_features": first, "in2_features": second}


def _recurrent(module: nn.RNNBase, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    inputs = module.weight_ih_l0.shape[1]
    if module.proj_size:
        projected, hidden = module.weight_hr_l0.shape
        return {"hidden_size": hidden, "input_size": inputs, "proj_size": projected}
    return {"hidden_size": module.weight_hh_l0.shape[1], "input_size": inputs}


def _recurrent_cell(module: nn.RNNCellBase, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    return {"hidden_size": module.weight_hh.shape[1], "input_size": module.weight_ih.shape[1]}


def _prelu(module: nn.PReLU, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    return {"num_parameters": len(module.weight)}


def _attention(module: nn.MultiheadAttention, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    fused = module.in_proj_weight
    keys, values = (fused, fused) if fused is not None else (module.k_proj_weight, module.v_proj_weight)
    return {"embed_dim": module.out_proj.weight.shape[0], "kdim": keys.shape[1], "vdim": values.shape[1]}


def _rms_norm(module: nn.RMSNorm, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    if "input" in numbers:  # torch may compute it in several operations, none of which takes the shape
        return {"normalized_shape": [size_of(a, choice) for a in numbers["input"][-len(module.normalized_shape) :]]}
    return _as_called(module, numbers, choice)


def _unflatten(module: nn.Unflatten, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    sizes = list(module.unflattened_size)
    if "input" not in numbers or -1 in sizes or not all(isinstance(size, int) for size in sizes):
        return {}  # it was not used, what is left open shrinks, or dimensions have names
    first = module.dim % len(numbers["input"])
    new = [size_of(axis, choice) for axis in numbers["output"][first : first + len(sizes)]]
    return {"unflattened_size": new} if new != sizes else {}


def _as_called(module: nn.Module, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    return {
        key: new
        for key, axis in numbers.items()
        if key not in ("input", "output") and (new := _renewed_number(module, key, axis, choice))
    }


_TRUE_VALUES: tuple[tuple[Any, Callable[[Any, dict[str, Any], Choice], dict[str, Any]]], ...] = (
    (_ConvNd, _convolution),
    (nn.Linear, _linear),
    (nn.Bilinear, _bilinear),
    ((nn.Embedding, nn.EmbeddingBag), _embedding),
    (nn.RNNBase, _recurrent),
    (nn.RNNCellBase, _recurrent_cell),
    (nn.PReLU, _prelu),
    (nn.MultiheadAttention, _attention),
    (nn.Unflatten, _unflatten),
    (nn.RMSNorm, _rms_norm),
    ((_NormBase, nn.GroupNorm, nn.LayerNorm, nn.ChannelShuffle), _as_called),
)


def _renewed_number(module: nn.Module, attribute: str, axis: Axis | list[Axis], choice: Choice) -> Any:
    """The axis's new size. Of a merged axis (instance norm sees batch * channels) only the last digits count."""
    if isinstance(axis, list):
        return [size_of(a, choice) for a in axis]
    parts = digits(axis)
    for start in range(len(parts) + 1):
        if math.prod(d.size for d in parts[start:]) == getattr(module, attribute, None):
            return math.prod(size_of(d, choice) for d in parts[start:])
    return None
