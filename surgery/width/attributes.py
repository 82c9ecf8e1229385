"""Plain attributes that store widths (`num_features`, `head_dim`, ...) and what they become in a narrower model."""

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from surgery.errors import SurgeryError
from surgery.width.sizes import Sizes, add_all, add_changes, add_counts, add_widths, merged
from surgery.width.solved import Axis, Choice, Solution, size_of
from surgery.width.trace import Step

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
            add_widths(of(module).widths, axis, choice)
            add_counts(of(module).counts, axis, choice)
    for step in solution.steps:
        for axis in (axis for tensor_axes in (*step.inputs, *step.outputs) for axis in tensor_axes):
            add_changes(of(step.module).widths, axis, choice)  # numbers of tokens and pixels are no widths
            add_counts(of(step.module).counts, axis, choice)
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
            add_all(found, axis, choice)
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
    """Whether attributes may be changed by their names; torch's own are in of_torch.py or hold none."""
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
