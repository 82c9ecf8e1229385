"""Plain attributes that store widths (`num_features`, `head_dim`, ...) and what they become in a narrower model."""

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from surgery.errors import SurgeryError
from surgery.width.solved import Axis, Choice, Solution, Sum, atoms, digits, grouping_of, size_of, terms
from surgery.width.trace import Step
from surgery.width.why import Kind

Sizes = dict[int, set[int]]  # old size -> what axes of that size become

# Names of attributes that store widths, that count heads or groups, and that are scales computed from widths.
# Attributes with other names are changed only if the model does not run as predicted otherwise.
_WIDTH = re.compile(r"dim|channel|chs|feat|width|hidden|planes|embed|inner|d_model|rank")
_COUNT = re.compile(r"heads?$|groups?$")
_SCALE = re.compile(r"scal|temp|norm|sqrt")
_LEAST = 4  # smaller numbers may well mean something else


class Known(NamedTuple):
    """What the steps say about the numbers of one module.

    Attributes:
        widths, counts: what sizes of features, and numbers of heads and groups, become.
        scales: (number, what it becomes) for numbers that an operation used and that are a power of a width.
    """

    widths: Sizes
    counts: Sizes
    scales: list[tuple[float, float]]


def known_by_module(solution: Solution, choice: Choice) -> dict[str, Known]:
    """What the tensors and the operations of each module say."""
    found: dict[str, Known] = {}

    def of(module: str) -> Known:
        return found.setdefault(module, Known({}, {}, []))

    for (module, _), tensor_axes in solution.tensors.items():
        for axis in tensor_axes:
            _add_widths(of(module).widths, axis, choice)
            _add_counts(of(module).counts, axis, choice)
    for step in solution.steps:
        for axis in (axis for tensor_axes in (*step.inputs, *step.outputs) for axis in tensor_axes):
            _add_changes(of(step.module).widths, axis, choice)  # numbers of tokens and pixels are no widths
            _add_counts(of(step.module).counts, axis, choice)
        for number, axis in _numbers(step):
            of(step.module).counts.setdefault(number, set()).add(size_of(axis, choice))
        of(step.module).scales.extend(_scales(step, choice))
    return found


def merge_known(several: Iterable[Known]) -> Known:
    """What several modules say, taken together."""
    several = list(several)
    return Known(
        merged(known.widths for known in several),
        merged(known.counts for known in several),
        [scale for known in several for scale in known.scales],
    )


def step_sizes(step: Step, choice: Choice) -> Sizes:
    """The sizes that one operation sees, and what they become."""
    found: Sizes = {}
    for tensor_axes in (*step.inputs, *step.outputs):
        for axis in tensor_axes:
            _add_all(found, axis, choice)
    return merged([found, argument_sizes(step, choice)])


def argument_sizes(step: Step, choice: Choice) -> Sizes:
    """The sizes that one operation was called with, and what they become."""
    found: Sizes = {}
    for number, axis in _numbers(step):
        found.setdefault(number, set()).add(size_of(axis, choice))
    return found


def _numbers(step: Step) -> list[tuple[int, Axis]]:
    return [(a.size, a) for axis in step.numbers.values() for a in (axis if isinstance(axis, list) else [axis])]


def _scales(step: Step, choice: Choice) -> Iterator[tuple[float, float]]:
    """Numbers that are a power of a width that shrinks, and what they become; attention's default scale is one."""
    last = [found[-1] for found in step.inputs if found]
    used = [value for value in step.scalars.values() if isinstance(value, float)]
    if step.name == "scaled_dot_product_attention":
        used.append(last[0].size ** -0.5)
    for value in used:
        for widths in (step.summed, last):  # scores are scaled by what was summed, queries by what will be summed
            found = []
            for axis in (axis for axis in widths if axis.size > 1):
                new = size_of(axis, choice)
                found += [(value, new**p) for p in (-0.5, 0.5) if math.isclose(value, axis.size**p, rel_tol=1e-9)]
                # torch's own attention scales queries and (transposed) keys by the root of the scale
                if new < axis.size and math.isclose(value, axis.size**-0.25, rel_tol=1e-9):
                    found.append((axis.size**-0.5, new**-0.5))
            if found:
                yield from found
                break


def known_edits(small: nn.Module, solution: Solution, choice: Choice) -> Iterator[dict[str, Any]]:
    """Edits after which the attributes of torch's own modules say what their tensors and operations are."""
    seen: dict[str, dict[str, Any]] = {}
    for step in solution.steps:
        seen.setdefault(step.module, {"input": step.inputs[0] if step.inputs else ()}).update(step.numbers)
    for name, module in small.named_modules():
        values = next((found for kinds, found in _TRUE_VALUES if isinstance(module, kinds)), None)
        for attribute, value in values(module, seen.get(name, {}), choice).items() if values else ():
            if hasattr(module, attribute) and getattr(module, attribute) != value:
                yield {"do": "set", "module": name, "attribute": attribute, "value": value}


# The true values of a narrow module's attributes. `numbers` are its operation's arguments that are sizes of axes.


def _convolution(module: _ConvNd, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    groups = size_of(numbers["groups"], choice) if "groups" in numbers else module.groups
    first, second = module.weight.shape[:2]
    if isinstance(module, _ConvTransposeNd):
        return {"groups": groups, "in_channels": first, "out_channels": second * groups}
    return {"groups": groups, "in_channels": second * groups, "out_channels": first}


def _linear(module: nn.Linear, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    return {"out_features": module.weight.shape[0], "in_features": module.weight.shape[1]}


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


def _as_called(module: nn.Module, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    return {
        key: new
        for key, axis in numbers.items()
        if key != "input" and (new := _renewed_number(module, key, axis, choice))
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


def certain_changes(module: nn.Module, known: Known) -> dict[str, Any]:
    """New values of attributes whose names say that they store widths, counts or scales, if only one value is possible.

    Raises SurgeryError for a scale that is the root of several widths that shrink differently.
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


def possible_changes(module: nn.Module, sizes: Sizes) -> dict[str, Any]:
    """New values of all attributes whose numbers are sizes that change."""
    if not _is_custom(module):
        return {}
    found = {}
    for name, value in vars(module).items():
        new = _renewed(value, sizes) if name != "training" else None
        if new is not None and new != value:
            found[name] = list(new) if isinstance(new, tuple) else new
    return found


def _is_custom(module: nn.Module) -> bool:
    """Whether attributes may be changed by their names; torch's own modules are in the table above or hold no width."""
    own = type(module).__module__.startswith("torch.nn.")
    known = isinstance(
        module, _ConvNd | nn.Linear | _NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm | nn.Embedding
    )
    return isinstance(module, nn.MultiheadAttention | nn.Transformer | nn.Unflatten) or not (own or known)


def _renewed(value: Any, sizes: Sizes) -> Any:
    """The value with its sizes replaced; None if nothing in it is a size that changes in exactly one way."""
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


# What the sizes along an axis become. Code may store the size of several consecutive digits or terms as one number.


def _add_all(found: Sizes, axis: Axis, choice: Choice) -> None:
    """The sizes of an axis and of all its parts."""
    for part in _parts(axis):
        _add(found, part, choice)


def _add_widths(found: Sizes, axis: Axis, choice: Choice) -> None:
    """The sizes of features: not of the digits that tell heads or groups apart."""
    for part in _parts(axis):
        if not (_grouping(part) and len(part.whole) > 1):
            _add(found, part, choice)


def _add_changes(found: Sizes, axis: Axis, choice: Choice) -> None:
    """The sizes of features that shrink."""
    for part in _parts(axis):
        if not (_grouping(part) and len(part.whole) > 1) and any(size_of(d, choice) != d.size for d in part.digits):
            _add(found, part, choice)


def _add_counts(found: Sizes, axis: Axis, choice: Choice) -> None:
    """The numbers of heads and groups."""
    for part in _parts(axis):
        if _grouping(part):
            _add(found, part, choice)


class _Part(NamedTuple):
    """Consecutive digits of an axis, and all of its digits."""

    digits: list[Axis]
    whole: list[Axis]


def _parts(axis: Axis) -> Iterator[_Part]:
    """The axis, each stretch of its consecutive digits, and the same for the terms of each digit."""
    own = digits(axis)
    stretches = [own[i:j] for i in range(len(own)) for j in range(i + 1, len(own) + 1)]
    for stretch in stretches or [[axis]]:
        if len(stretch) == 1 or not any(map(_is_of_input, stretch)):
            yield _Part(stretch, own)
    for digit in own:
        if isinstance(digit, Sum):
            for term in dict.fromkeys(terms(digit)):
                yield from _parts(term)


def _is_of_input(digit: Axis) -> bool:
    return all(atom.why and atom.why.kind is Kind.INPUT for atom in atoms(digit))


def _grouping(part: _Part) -> bool:
    """Whether it is a single digit that tells heads or groups apart."""
    return len(part.digits) == 1 and bool(grouping_of(part.digits[0]))


def _add(found: Sizes, part: _Part, choice: Choice) -> None:
    old = math.prod(d.size for d in part.digits)
    found.setdefault(old, set()).add(math.prod(size_of(d, choice) for d in part.digits))


def merged(several: Iterable[Sizes]) -> Sizes:
    """The sizes of several modules, taken together."""
    result: Sizes = {}
    for sizes in several:
        for old, new in sizes.items():
            result.setdefault(old, set()).update(new)
    return result
