"""The registry of rules, by the names of operations, and helpers for rules."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from surgery.width.axes import Axis, find, fix, unify
from surgery.width.ledger import Ledger
from surgery.width.why import Why, picked, role

Rule = Callable[[Ledger, dict[str, Any], Any], dict[str, Axis | list[Axis]] | None]

RULES: dict[str, Rule] = {}


def rule(names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operations, whose names have no namespace, overload and in-place underscore."""

    def register(rule: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


def fresh(shape: Iterable[int], why: Why | None = None) -> list[Axis]:
    """New axes of these sizes."""
    return [Axis(size, why) for size in shape]


def results(out: Any) -> list[Tensor]:
    """The tensors that an operation returned."""
    return [t for t in (out if isinstance(out, list | tuple) else [out]) if isinstance(t, Tensor)]


def broadcast(trace: Ledger, tensors: list[Tensor], shape) -> list[Axis]:
    """The axes of tensors that were broadcast against each other."""
    result = []
    for position in range(1, len(shape) + 1):
        same = [trace.axes_of(t)[-position] for t in tensors if t.ndim >= position]
        same = [axis for axis in same if axis.size == shape[-position]]
        for other in same[1:]:
            unify(same[0], other)
        result.append(find(same[0]) if same else Axis(shape[-position]))
    return result[::-1]


def gathered(trace: Ledger, found: list[Axis], out: Tensor) -> None:
    """Data decide which positions are picked, so all axes are fixed."""
    for axis in found:
        fix(axis, picked("positions are picked by data"))
    for result in results(out):
        trace.assign(result, fresh(result.shape, picked("positions are picked by data")))


def windowed(trace: Ledger, found: Sequence[Axis], sizes: Sequence[int], window: Sequence[int]) -> list[Axis]:
    """Axes that a window of these lengths slid over."""
    kept = []
    for axis, size, length in zip(found, sizes, window):
        if axis.size != size:
            fix(axis, role("a window slides over it"))
            axis = Axis(size, role("a window slides over it"))
        elif length > 1:
            trace.ordered.append(axis)
        kept.append(axis)
    return kept
