"""Plain attributes that store widths (`num_features`, `head_dim`, ...) and what they become in a narrower model."""

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from surgery.width.axes import Axis, digits, find, new_size, terms
from surgery.width.trace import Step, Trace

Keep = Callable[[Axis], int]
Sizes = dict[int, set[int]]  # old size -> what axes of that size become

# An attribute of such a name counts something else, even if its number is that of a width.
_OTHER = re.compile(
    r"kernel|stride|pad|dilat|patch|window|win_|img|image|grid|resol|depth|layers$|blocks|area|shift|seq|token|classes"
    r"|reduction|ratio|level|expan|mult|stage|factor|halo|prefix|input|drop|rate|iters|max_|min_|size$|_len|length|steps"
)


def sizes_by_module(trace: Trace, keep: Keep) -> dict[str, Sizes]:
    """For each module the sizes of its own tensors and of what its own operations see, and what they become."""
    found: dict[str, Sizes] = {}
    for (module, _), tensor_axes in trace.tensors.items():
        for axis in tensor_axes:
            _note(found.setdefault(module, {}), axis, keep)
    for step in trace.steps:
        found[step.module] = merged([found.get(step.module, {}), step_sizes(step, keep)])
    return found


def step_sizes(step: Step, keep: Keep) -> Sizes:
    """The sizes that one operation sees, and what they become."""
    found: Sizes = {}
    for tensor_axes in (*step.inputs, *step.outputs):
        for axis in tensor_axes:
            _note(found, axis, keep)
    for number, axis in step.numbers.items():
        found.setdefault(number, set()).add(new_size(axis, keep))
    return found


def known_edits(small: nn.Module, numbers: dict[str, dict[int, int]]) -> Iterator[dict[str, Any]]:
    """Edits that make torch's own modules say what their tensors are; `numbers` are new group counts by module."""
    for name, module in small.named_modules():
        for attribute, value in _true_values(module, numbers.get(name, {})).items():
            if hasattr(module, attribute) and getattr(module, attribute) != value:
                yield {"do": "set", "module": name, "attribute": attribute, "value": value}


def _true_values(module: nn.Module, numbers: dict[int, int]) -> dict[str, Any]:
    weight = getattr(module, "weight", None)
    if isinstance(module, _ConvNd):
        groups = numbers.get(module.groups, module.groups)
        outer, inner = weight.shape[0], weight.shape[1] * groups
        if isinstance(module, _ConvTransposeNd):
            outer, inner = weight.shape[1] * groups, weight.shape[0]
        return {"groups": groups, "in_channels": inner, "out_channels": outer}
    if isinstance(module, nn.Linear):
        return {"out_features": weight.shape[0], "in_features": weight.shape[1]}
    if isinstance(module, _NormBase):
        vector = weight if weight is not None else module.running_mean
        return {} if vector is None else {"num_features": len(vector)}
    if isinstance(module, nn.GroupNorm):
        groups = numbers.get(module.num_groups, module.num_groups)
        return {"num_groups": groups, **({} if weight is None else {"num_channels": len(weight)})}
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return {} if weight is None else {"normalized_shape": list(weight.shape)}
    if isinstance(module, nn.Embedding):
        return {"num_embeddings": weight.shape[0], "embedding_dim": weight.shape[1]}
    if isinstance(module, nn.RNNBase):
        return {"hidden_size": module.weight_hh_l0.shape[1], "input_size": module.weight_ih_l0.shape[1]}
    if isinstance(module, nn.PReLU):
        return {"num_parameters": len(weight)}
    return {}


def candidates(module: nn.Module, sizes: Sizes, *, sure: bool) -> dict[str, Any]:
    """Attributes of a module whose numbers are sizes that change, with their new values.

    With `sure` only those of a fitting name whose number can become one thing alone; else all that may be meant.
    """
    if _true_values_apply(module):
        return {}
    found = {}
    for name, value in vars(module).items():
        if name.startswith("_") or name == "training" or (sure and _OTHER.search(name)):
            continue
        new = _renewed(value, sizes, sure)
        if new is not None and new != value:
            found[name] = list(new) if isinstance(new, tuple) else new
    return found


def _true_values_apply(module: nn.Module) -> bool:
    return isinstance(module, _ConvNd | nn.Linear | _NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm | nn.Embedding)


def _renewed(value: Any, sizes: Sizes, sure: bool) -> Any:
    """The value with its sizes replaced; None where nothing in it is a size that changes."""
    if isinstance(value, bool | Tensor):
        return None
    if isinstance(value, int):
        options = sizes.get(value, set())
        changed = options - {value}
        return next(iter(changed)) if len(changed) == 1 and (len(options) == 1 or not sure) else None
    if isinstance(value, float):
        for old, options in sizes.items():
            for power in (-0.5, 0.5, -1.0):
                changed = options - {old}
                if old > 1 and len(changed) == 1 and abs(value - old**power) < 1e-9 * old**power:
                    return float(next(iter(changed)) ** power) if len(options) == 1 or not sure else None
        return None
    if isinstance(value, list | tuple) and value and all(isinstance(item, int) for item in value):
        new = [_renewed(item, sizes, sure) for item in value]
        if any(item is not None for item in new):
            return (
                type(value)(old if item is None else item for old, item in zip(value, new))
                if type(value) in (list, tuple)
                else None
            )
    return None


def _note(found: Sizes, axis: Axis, keep: Keep) -> None:
    """An axis, every run of its consecutive digits, and the same for its terms."""
    parts = [(d.size, new_size(d, keep)) for d in digits(axis)]
    found.setdefault(axis.size, set()).add(new_size(axis, keep))
    for start in range(len(parts)):
        for old, new in accumulate(parts[start:], lambda a, b: (a[0] * b[0], a[1] * b[1])):
            found.setdefault(old, set()).add(new)
    for digit in digits(axis):
        if find(digit).kind == "sum":
            for term in dict.fromkeys(terms(digit)):
                _note(found, term, keep)


def merged(several: Iterable[Sizes]) -> Sizes:
    """Sizes of several modules, together."""
    result: Sizes = {}
    for sizes in several:
        for old, new in sizes.items():
            result.setdefault(old, set()).update(new)
    return result
