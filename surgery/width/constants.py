"""Numbers in attributes that are the size of a width or count heads or groups.

`new_sizes` says what such numbers become in a narrower model; `layer_edits` sets them in torch's own modules.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from surgery.names import named_modules
from surgery.width.axes import ReasonKind
from surgery.width.scales import Scales
from surgery.width.solve import Axis, Choice, Solution, Sum, atoms, digits, grouping_of, size_of, terms
from surgery.width.steps import Step

SizeChanges = dict[int, set[int]]  # old size -> what axes of that size become


class _DigitRun(NamedTuple):
    """Consecutive digits of an axis. Code may store their size as one number.

    Attributes:
        old, new: how many positions they have, and have in the narrow model.
        is_count, is_width: whether they count heads or groups, and whether they are features.
        changes: whether one of them shrinks.
    """

    old: int
    new: int
    is_count: bool
    is_width: bool
    changes: bool


def _parts(axis: Axis, choice: Choice) -> Iterator[_DigitRun]:
    """Yield an axis, its stretches of digits, and the same of the digits' terms."""
    axis_digits = digits(axis)
    stretches: list[Sequence[Axis]] = [
        axis_digits[i:j] for i in range(len(axis_digits)) for j in range(i + 1, len(axis_digits) + 1)
    ]
    for stretch in stretches or [[axis]]:
        if len(stretch) == 1 or not any(map(_is_of_input, stretch)):
            old, new = [digit.size for digit in stretch], [size_of(digit, choice) for digit in stretch]
            is_count = len(stretch) == 1 and bool(grouping_of(stretch[0]))
            yield _DigitRun(
                math.prod(old), math.prod(new), is_count, not (is_count and len(axis_digits) > 1), old != new
            )
    for digit in axis_digits:
        if isinstance(digit, Sum):
            for term in dict.fromkeys(terms(digit)):
                yield from _parts(term, choice)


def _is_of_input(digit: Axis) -> bool:
    return all(atom.why and atom.why.kind is ReasonKind.INPUT for atom in atoms(digit))


def merge_sizes(several: Iterable[SizeChanges]) -> SizeChanges:
    """Return the sizes of several modules, taken together."""
    result: SizeChanges = {}
    for sizes in several:
        for old, new in sizes.items():
            result.setdefault(old, set()).update(new)
    return result


COUNT = re.compile(r"(?<!d_)heads?$|groups?$|cardinality$")  # names of numbers of heads or groups
LEAST = 4  # smaller numbers may well mean something else


class NewSizes(NamedTuple):
    """The numbers of one module in the narrow model.

    Attributes:
        widths, counts: what sizes of features, and numbers of heads and groups, become.
        scales: (number, what it becomes) for numbers that an operation used and that are a power of a width.
    """

    widths: SizeChanges
    counts: SizeChanges
    scales: list[tuple[float, float]]

    @property
    def numbers(self) -> SizeChanges:
        """Widths and counts together."""
        return merge_sizes([self.widths, self.counts])

    def add(self, parts: Iterable[_DigitRun], only_changes: bool) -> None:
        """Note the sizes of an axis's parts."""
        for part in parts:
            if part.is_width and (part.changes or not only_changes):
                self.widths.setdefault(part.old, set()).add(part.new)
            if part.is_count:
                self.counts.setdefault(part.old, set()).add(part.new)


def new_sizes(solution: Solution, choice: Choice, scales: Scales) -> dict[str, NewSizes]:
    """Return what each module's tensors and operations say, by module."""
    by_module: dict[str, NewSizes] = defaultdict(lambda: NewSizes({}, {}, []))
    parts_of = cache(lambda axis: list(_parts(axis, choice)))  # many tensors lie along one axis
    for (module, _), tensor_axes in solution.tensors.items():
        for axis in tensor_axes:
            by_module[module].add(parts_of(axis), only_changes=False)
    known: dict[str, set[Axis]] = defaultdict(set)  # by module the axes of earlier steps
    for place, step in enumerate(solution.steps):
        sizes = by_module[step.module]
        others = set(step.axes()) - known[step.module]
        known[step.module] |= others
        for axis in others:
            sizes.add(parts_of(axis), only_changes=True)  # numbers of tokens and pixels are no widths
        for number, axis in _numbers(step):
            sizes.counts.setdefault(number, set()).add(size_of(axis, choice))
        sizes.scales.extend(scales.of(place))
    return by_module


def together(several: Iterable[NewSizes]) -> NewSizes:
    """Return what several modules say, taken together."""
    several = list(several)
    return NewSizes(
        merge_sizes(sizes.widths for sizes in several),
        merge_sizes(sizes.counts for sizes in several),
        [scale for sizes in several for scale in sizes.scales],
    )


def step_sizes(step: Step[Axis], choice: Choice) -> SizeChanges:
    """Return the sizes that one operation sees, and what they become."""
    parts = [(part.old, part.new) for axis in step.axes() for part in _parts(axis, choice)]
    arguments = [(number, size_of(axis, choice)) for number, axis in _numbers(step)]
    return merge_sizes({old: {new}} for old, new in (*parts, *arguments))


def _numbers(step: Step[Axis]) -> list[tuple[int, Axis]]:
    return [(a.size, a) for axis in step.numbers.values() for a in (axis if isinstance(axis, list) else [axis])]


def renew(value: Any, sizes: SizeChanges) -> Any:
    """Return numbers with sizes replaced; None if none changes in exactly one way.

    >>> renew(8, {8: {6}}), renew((8, 3), {8: {6}}), renew(8, {8: {6, 4}})
    (6, (6, 3), None)
    """
    if type(value) in (list, tuple, torch.Size) and value and all(isinstance(item, int) for item in value):
        new = [renew(item, sizes) for item in value]
        changed = any(item is not None for item in new)
        return type(value)(old if item is None else item for old, item in zip(value, new)) if changed else None
    others = sizes.get(value, set()) - {value} if isinstance(value, int) and not isinstance(value, bool) else set()
    return next(iter(others)) if len(others) == 1 else None


def layer_edits(small: nn.Module, solution: Solution, choice: Choice) -> Iterator[dict[str, Any]]:
    """Yield edits that make attributes of torch's own modules fit their tensors."""
    seen: dict[str, dict[str, Any]] = {}
    modules = dict(named_modules(small))
    for step in solution.steps:
        ends = {"input": step.inputs[0] if step.inputs else (), "output": step.outputs[0] if step.outputs else ()}
        numbers = seen.setdefault(step.module, {**ends, "_heads": {}})
        numbers.update(step.numbers)
        if isinstance(modules.get(step.module), nn.MultiheadAttention):
            parts = (atom for axis in step.axes() for atom in atoms(axis))
            numbers["_heads"] |= {atom: None for atom in parts if atom.grouping == "heads" and not atom.why}  # no batch
    for name, module in modules.items():
        values = next((function for kinds, function in _TRUE_VALUES if isinstance(module, kinds)), None)
        for attribute, value in values(module, seen.get(name, {}), choice).items() if values else ():
            if hasattr(module, attribute) and getattr(module, attribute) != value:
                yield {"do": "set", "module": name, "attribute": attribute, "value": value}


def _weight(module: Any) -> Tensor:
    """Return the weight, or the parameter from which a hook makes it in every call.

    So do `torch.nn.utils`' weight_norm (weight_v), spectral_norm and prune (weight_orig). Until then the old weight
    lies beside it.
    """
    made_of = [module._parameters[name] for name in ("weight_v", "weight_orig") if name in module._parameters]
    return made_of[0] if made_of else module.weight


def _convolution(module: _ConvNd, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    groups = size_of(numbers["groups"], choice) if "groups" in numbers else module.groups
    first, second = _weight(module).shape[:2]
    if isinstance(module, _ConvTransposeNd):
        return {"groups": groups, "in_channels": first, "out_channels": second * groups}
    return {"groups": groups, "in_channels": second * groups, "out_channels": first}


def _recurrent(module: Any, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    inputs = module.weight_ih_l0.shape[1]
    if module.proj_size:
        projected, hidden = module.weight_hr_l0.shape
        return {"hidden_size": hidden, "input_size": inputs, "proj_size": projected}
    return {"hidden_size": module.weight_hh_l0.shape[1], "input_size": inputs}


def _attention(module: nn.MultiheadAttention, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    fused, width = module.in_proj_weight, module.out_proj.weight.shape[0]
    heads = next(
        (size_of(a, choice) for a in numbers.get("_heads", ()) if a.size == module.num_heads), module.num_heads
    )
    keys, values = (fused, fused) if fused is not None else (module.k_proj_weight, module.v_proj_weight)
    sizes = {"embed_dim": width, "kdim": keys.shape[1], "vdim": values.shape[1]}
    return {**sizes, "num_heads": heads, "head_dim": width // heads}  # it assumes embed_dim = num_heads * head_dim


def _rms_norm(module: nn.RMSNorm, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
    if "input" in numbers:  # torch may compute it in several operations, and none takes the shape
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
        if key not in ("input", "output", "_heads") and (new := _renew_number(module, key, axis, choice))
    }


def _sides(*attributes: str) -> Callable[[nn.Module, dict[str, Any], Choice], dict[str, Any]]:
    """Return attributes that are the sizes of the weight's axes, in their order."""

    def values(module: nn.Module, numbers: dict[str, Any], choice: Choice) -> dict[str, Any]:
        return dict(zip(attributes, _weight(module).shape))

    return values


_TRUE_VALUES: tuple[tuple[Any, Callable[[Any, dict[str, Any], Choice], dict[str, Any]]], ...] = (
    (_ConvNd, _convolution),
    (nn.Linear, _sides("out_features", "in_features")),
    (nn.Bilinear, _sides("out_features", "in1_features", "in2_features")),
    ((nn.Embedding, nn.EmbeddingBag), _sides("num_embeddings", "embedding_dim")),
    (nn.RNNBase, _recurrent),
    (
        nn.RNNCellBase,
        lambda module, *_: {"hidden_size": module.weight_hh.shape[1], "input_size": module.weight_ih.shape[1]},
    ),
    (nn.PReLU, _sides("num_parameters")),
    (nn.MultiheadAttention, _attention),
    (nn.Unflatten, _unflatten),
    (nn.RMSNorm, _rms_norm),
    ((_NormBase, nn.GroupNorm, nn.LayerNorm, nn.ChannelShuffle), _as_called),
)


def _renew_number(module: nn.Module, attribute: str, axis: Axis | list[Axis], choice: Choice) -> Any:
    """Return the axis's new size.

    Of a merged axis (instance norm sees batch * channels) only the last digits count.
    """
    if isinstance(axis, list):
        return [size_of(a, choice) for a in axis]
    parts = digits(axis)
    for start in range(len(parts) + 1):
        if math.prod(d.size for d in parts[start:]) == getattr(module, attribute, None):
            return math.prod(size_of(d, choice) for d in parts[start:])
    return None
