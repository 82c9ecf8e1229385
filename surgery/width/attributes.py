"""Plain attributes that store widths (`num_features`, `head_dim`, ...) and what they become in a narrower model."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from surgery.errors import SurgeryError
from surgery.width.axes import Axis, atoms, digits, find, is_fixed, new_size, terms
from surgery.width.trace import Step, Trace
from surgery.width.widths import Keep

Sizes = dict[int, set[int]]  # old size -> what axes of that size become

# Names of attributes that store widths, of those that count heads or groups, and of scales made from widths. An
# attribute of another name is changed only where the model does not run as predicted without.
_WIDTH = re.compile(r"dim|channel|chs|feat|width|hidden|planes|embed|inner|d_model")
_COUNT = re.compile(r"heads?$|groups?$")
_SCALE = re.compile(r"scal|temp|norm|sqrt")
_LEAST = 4  # smaller numbers are as likely to mean something else


class Known(NamedTuple):
    """What the steps say about the numbers of one module.

    Attributes:
        widths, counts: what sizes of features and of groupings become.
        scales: (number, what it becomes), for numbers that an operation used and that are a power of a width.
    """

    widths: Sizes
    counts: Sizes
    scales: list[tuple[float, float]]


def known_by_module(trace: Trace, keep: Keep) -> dict[str, Known]:
    """For each module what its own tensors and its own operations say."""
    found: dict[str, Known] = {}

    def of(module: str) -> Known:
        return found.setdefault(module, Known({}, {}, []))

    for (module, _), tensor_axes in trace.tensors.items():
        for axis in tensor_axes:
            _note(of(module).widths, axis, keep, "widths")
            _note(of(module).counts, axis, keep, "counts")
    for step in trace.steps:
        for axis in (axis for tensor_axes in (*step.inputs, *step.outputs) for axis in tensor_axes):
            _note(of(step.module).widths, axis, keep, "changes")  # numbers of tokens and pixels say nothing of widths
            _note(of(step.module).counts, axis, keep, "counts")
        for number, axis in _numbers(step):
            of(step.module).counts.setdefault(number, set()).add(new_size(axis, keep))
        of(step.module).scales.extend(_scales(step, keep))
    return found


def together(several: Iterable[Known]) -> Known:
    """What several modules say."""
    several = list(several)
    return Known(
        merged(known.widths for known in several),
        merged(known.counts for known in several),
        [scale for known in several for scale in known.scales],
    )


def step_sizes(step: Step, keep: Keep) -> Sizes:
    """The sizes that one operation sees, and what they become."""
    found: Sizes = {}
    for tensor_axes in (*step.inputs, *step.outputs):
        for axis in tensor_axes:
            _note(found, axis, keep)
    for number, axis in _numbers(step):
        found.setdefault(number, set()).add(new_size(axis, keep))
    return found


def _numbers(step: Step) -> list[tuple[int, Axis]]:
    return [(a.size, a) for axis in step.numbers.values() for a in (axis if isinstance(axis, list) else [axis])]


def _scales(step: Step, keep: Keep) -> Iterator[tuple[float, float]]:
    """A number that is a root of a width that shrinks, and what it becomes; attention's own default among them."""
    last = [found[-1] for found in step.inputs if found]
    used = [value for value in step.scalars.values() if isinstance(value, float)]
    if step.name == "scaled_dot_product_attention":
        used.append(last[0].size ** -0.5)
    for value in used:
        for widths in (step.summed, last):  # scores are scaled by what was summed, queries by what will be
            found = []
            for axis in (axis for axis in widths if axis.size > 1):
                new = new_size(axis, keep)
                found += [(value, new**p) for p in (-0.5, 0.5) if math.isclose(value, axis.size**p, rel_tol=1e-9)]
                # torch's own attention scales queries and (transposed) keys by the root of the scale
                if new < axis.size and math.isclose(value, axis.size**-0.25, rel_tol=1e-9):
                    found.append((axis.size**-0.5, new**-0.5))
            if found:
                yield from found
                break


def known_edits(small: nn.Module, trace: Trace, keep: Keep) -> Iterator[dict[str, Any]]:
    """Edits that make torch's own modules say what their tensors are and what their operations do."""
    seen: dict[str, dict[str, Any]] = {}
    for step in trace.steps:
        seen.setdefault(step.module, {"input": step.inputs[0] if step.inputs else ()}).update(step.numbers)
    for name, module in small.named_modules():
        for attribute, value in _true_values(module, seen.get(name, {}), keep).items():
            if hasattr(module, attribute) and getattr(module, attribute) != value:
                yield {"do": "set", "module": name, "attribute": attribute, "value": value}


def _true_values(module: nn.Module, numbers: dict[str, Any], keep: Keep) -> dict[str, Any]:
    weight = getattr(module, "weight", None)
    if isinstance(module, _ConvNd):
        groups = new_size(numbers["groups"], keep) if "groups" in numbers else module.groups
        outer, inner = weight.shape[0], weight.shape[1] * groups
        if isinstance(module, _ConvTransposeNd):
            outer, inner = weight.shape[1] * groups, weight.shape[0]
        return {"groups": groups, "in_channels": inner, "out_channels": outer}
    if isinstance(module, nn.Linear):
        return {"out_features": weight.shape[0], "in_features": weight.shape[1]}
    if isinstance(module, nn.Embedding):
        return {"num_embeddings": weight.shape[0], "embedding_dim": weight.shape[1]}
    if isinstance(module, nn.RNNBase):
        inputs = module.weight_ih_l0.shape[1]
        if module.proj_size:
            projected, hidden = module.weight_hr_l0.shape
            return {"hidden_size": hidden, "input_size": inputs, "proj_size": projected}
        return {"hidden_size": module.weight_hh_l0.shape[1], "input_size": inputs}
    if isinstance(module, nn.RNNCellBase):
        return {"hidden_size": module.weight_hh.shape[1], "input_size": module.weight_ih.shape[1]}
    if isinstance(module, nn.PReLU):
        return {"num_parameters": len(weight)}
    if isinstance(module, nn.MultiheadAttention):
        fused = module.in_proj_weight
        keys, values = (fused, fused) if fused is not None else (module.k_proj_weight, module.v_proj_weight)
        return {"embed_dim": module.out_proj.weight.shape[0], "kdim": keys.shape[1], "vdim": values.shape[1]}
    if isinstance(module, nn.RMSNorm) and "input" in numbers:  # torch may do it in several operations
        return {"normalized_shape": [new_size(a, keep) for a in numbers["input"][-len(module.normalized_shape) :]]}
    if isinstance(module, _NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm | nn.ChannelShuffle):
        return {
            key: new
            for key, axis in numbers.items()
            if key != "input" and (new := _renewed_number(module, key, axis, keep))
        }
    return {}


def _renewed_number(module: nn.Module, attribute: str, axis: Axis | list[Axis], keep: Keep) -> Any:
    """The axis's new size; of a merged axis (instance norm sees batch * channels) that of the last digits."""
    if isinstance(axis, list):
        return [new_size(a, keep) for a in axis]
    parts = digits(axis)
    for start in range(len(parts) + 1):
        if math.prod(d.size for d in parts[start:]) == getattr(module, attribute, None):
            return math.prod(new_size(d, keep) for d in parts[start:])
    return None


def sure(module: nn.Module, known: Known) -> dict[str, Any]:
    """Attributes that by their names store widths, counts of heads or scales, and can become one thing alone.

    Raises SurgeryError for a scale that is the root of several widths, which shrink differently.
    """
    if not _is_custom(module):
        return {}
    found = {}
    for name, value in vars(module).items():
        sizes = known.counts if _COUNT.search(name) else known.widths if _WIDTH.search(name) else None
        new = None
        if isinstance(value, float) and _SCALE.search(name):
            options = {b for a, b in known.scales if math.isclose(a, value, rel_tol=1e-9)}
            if len(options) > 1:
                raise SurgeryError(
                    f"{name!r} of {type(module).__name__} is {value} and would become one of {sorted(options)}: "
                    "compute it from a shape in the forward pass"
                )
            new = next(iter(options), None)
        elif sizes is not None and not name.startswith("_"):
            new = _renewed(value, {n: s for n, s in sizes.items() if len(s) == 1 and n >= _LEAST})
        if new is not None and new != value:
            found[name] = list(new) if isinstance(new, tuple) else new
    return found


def candidates(module: nn.Module, sizes: Sizes) -> dict[str, Any]:
    """All attributes whose numbers are sizes that change, with their new values."""
    if not _is_custom(module):
        return {}
    found = {}
    for name, value in vars(module).items():
        new = _renewed(value, sizes) if name != "training" else None
        if new is not None and new != value:
            found[name] = list(new) if isinstance(new, tuple) else new
    return found


def _is_custom(module: nn.Module) -> bool:
    """torch's own modules are in the table above or hold no widths, but for these."""
    own = type(module).__module__.startswith("torch.nn.")
    known = isinstance(
        module, _ConvNd | nn.Linear | _NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm | nn.Embedding
    )
    return isinstance(module, nn.MultiheadAttention | nn.Transformer | nn.Unflatten) or not (own or known)


def _renewed(value: Any, sizes: Sizes) -> Any:
    """The value with its sizes replaced; None where nothing in it is a size that changes in one way."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        changed = sizes.get(value, set()) - {value}
        return next(iter(changed)) if len(changed) == 1 else None
    if type(value) in (list, tuple, torch.Size) and value and all(isinstance(item, int) for item in value):
        new = [_renewed(item, sizes) for item in value]
        if any(item is not None for item in new):
            return tuple(old if item is None else item for old, item in zip(value, new))
    return None


def _note(found: Sizes, axis: Axis, keep: Keep, what: Literal["all", "widths", "changes", "counts"] = "all") -> None:
    """An axis, the runs of its consecutive digits (but for those of the input), and the same for its terms."""
    own = digits(axis)
    runs: list[list[Axis]] = [own[i:j] for i in range(len(own)) for j in range(i + 1, len(own) + 1)]
    for run in runs or [[axis]]:
        grouping = len(run) == 1 and run[0].grouping
        if (what in ("widths", "changes") and grouping and len(own) > 1) or (what == "counts" and not grouping):
            continue
        if what == "changes" and all(new_size(d, keep) == d.size for d in run):
            continue
        if len(run) > 1 and any(is_fixed(d) and next(atoms(d)).fixed == "it is an axis of the input" for d in run):
            continue
        found.setdefault(math.prod(d.size for d in run), set()).add(math.prod(new_size(d, keep) for d in run))
    for digit in own:
        if find(digit).kind == "sum":
            for term in dict.fromkeys(terms(digit)):
                _note(found, term, keep, what)


def merged(several: Iterable[Sizes]) -> Sizes:
    """Sizes of several modules, together."""
    result: Sizes = {}
    for sizes in several:
        for old, new in sizes.items():
            result.setdefault(old, set()).update(new)
    return result
