"""Rules by the names of operations, and what several rules need."""

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.width.axes import Axes, Axis, Why, find, fix, mark_grouping, picked, place, regroup, role, unify


class View(NamedTuple):
    """A tensor as a rule sees it.

    Attributes:
        axes_of: the axes of a tensor; new ones if it was not seen before.
        is_weight: whether it is a parameter, or was computed from parameters and constants (a mask) alone.
    """

    axes_of: Callable[[Tensor], Axes]
    is_weight: Callable[[Tensor], bool]


RANGE = "a window or a range runs over it, so that the order of its positions matters"


class RuleResult(NamedTuple):
    """The answer of a rule about a call.

    Attributes:
        axes: the axes of the result; of each result if there are several: one entry for each, or one for all.
        sizes: arguments of the call, or attributes of torch's own modules, that are sizes of these axes.
        features: axes along which a layer with weights makes features.
        prefix_only: axes whose kept positions must be 0, 1, 2, ... without a gap.
        order: why they must.
        summed: the axis that was summed to compute the result.
        is_weight: whether the result consists of weights, although data picked them.
        explicit: axes of the result whose sizes the call says, where it leaves another one open (-1).
        fixed_when_read: axes that keep their size, and why, should a later operation use the last result: code may want
            no more than its shape, or than the numbers that come before indices.
    """

    axes: Sequence[Axis] | Sequence[Sequence[Axis]]
    sizes: Mapping[str, Axis | list[Axis]] = {}
    features: Sequence[Axis] = ()
    prefix_only: Sequence[Axis] = ()
    order: str = RANGE
    summed: Axis | None = None
    is_weight: bool = False
    explicit: Sequence[Axis] = ()
    fixed_when_read: Sequence[tuple[Axis, Why]] = ()


RuleFunction = Callable[[View, dict[str, Any], Any], RuleResult | Axes | list]
"""From what a rule may ask, the call's arguments by name and the result to the result's axes, or a `RuleResult`."""


@dataclass(frozen=True)
class Rule:
    """The rule of an operation, and what else is known of it.

    Attributes:
        name: the operation's name, which several operations that do the same have in common.
        function: what it does to axes.
        sizes: arguments that the results' shapes show; they are not compared between a model and a narrow one.
        layout: whether the result is the first argument in another layout of memory, which a narrow model may not need.
        carries: whether the result holds the numbers of the first argument, so that it is a sum over the same axis.
        taught: whether `register_rule` added it.
    """

    name: str
    function: RuleFunction
    sizes: frozenset[str] = frozenset()
    layout: bool = False
    carries: bool = False
    taught: bool = False


class RuleError(SurgeryError):
    """A rule that `register_rule` added is wrong."""


RULES: dict[str, Rule] = {}
TAGGED: dict[torch.Tag, RuleFunction] = {}
"""The rules of operations that have a tag but no rule of their own, by tag."""


def rule(
    names: str,
    *,
    same: str = "",
    tag: torch.Tag | None = None,
    sizes: Collection[str] = (),
    layout: bool = False,
    carries: bool = False,
) -> Callable[[RuleFunction], RuleFunction]:
    """Register a rule for operations.

    Names of aten's have no namespace, and none has an overload or a last underscore.

    Args:
        same: other names of the first of these operations.
        tag: operations with this tag have this rule too, unless they have one of their own.
        sizes, layout, carries: see `Rule`.
    """
    head, *others = names.split()

    def register(function: RuleFunction) -> RuleFunction:
        for name in (head, *others):
            RULES[name] = Rule(name, function, frozenset(sizes), layout, carries or layout)
        RULES.update(dict.fromkeys(same.split(), RULES[head]))
        if tag is not None:
            TAGGED[tag] = function
        return function

    return register


def canonical(name: str) -> str:
    """Return the name under which an operation's rule is kept.

    It is the name without aten's namespace and the in-place underscore.

    >>> canonical("aten::add_"), canonical("aten::__and__"), canonical("mylib::norm")
    ('add', '__and__', 'mylib::norm')
    """
    name = name.removeprefix("aten::")
    return name if name.startswith("__") else name.rstrip("_") or name


@cache
def _name_of(func: Any) -> str:
    return canonical(func._schema.name)


def rule_for(func: Any) -> Rule | None:
    """Return the rule for an operation, or None."""
    name = _name_of(func)
    if name in RULES:
        return RULES[name]
    return next((Rule(name, function) for tag, function in TAGGED.items() if tag in func.tags), None)


def operation_name(func: Any) -> str:
    """Return the name of an operation, `add` for aten.add_.Tensor.

    Variants of one operation, and operations that do the same, share a name.
    """
    name = _name_of(func)
    return RULES[name].name if name in RULES else name


def argument_names(operation: str) -> list[str]:
    """Return the argument names of a registered operation and its in-place variant.

    There are none before the operation is registered.
    """
    space, _, bare = operation.rpartition("::")
    packets = [getattr(getattr(torch.ops, space or "aten"), name, None) for name in (bare, f"{bare}_")]
    schemas = [getattr(packet, name)._schema for packet in packets if packet for name in packet.overloads()]
    return list(dict.fromkeys(argument.name for schema in schemas for argument in schema.arguments))


def way_to_teach(name: str) -> str:
    """Return what to do about an operation without a rule.

    If no operation has the rule's name, one with a similar name was meant.
    """
    unused = [key for key, rule in RULES.items() if rule.taught and not argument_names(key)]
    if near := difflib.get_close_matches(name, unused, n=1):
        return f"there is a rule for {near[0]}, which is no operation: did you mean {name}?"
    return "add a rule with surgery.register_rule"


def is_step(func: Any) -> bool:
    """Return whether an operation computes, not only shows numbers in another layout."""
    return not ((rule := rule_for(func)) and rule.layout)


COUNTED = picked("data decide how many positions it has")
"""The reason of axes whose size may be another one in a narrow model."""
INDICES = picked("the order of its positions matters")
"""The reason of axes whose positions an operation returns."""


def first(args: dict[str, Any], names: str) -> Any:
    """Return the first of these arguments that an operation has.

    Variants of one operation name them differently.
    """
    return next((args[name] for name in names.split() if name in args), None)


def tensors(args: dict[str, Any]) -> list[Tensor]:
    """Return the arguments that are tensors."""
    return [value for value in args.values() if isinstance(value, Tensor)]


def results(out: Any) -> list[Tensor]:
    """Return the tensors that an operation returned."""
    return [t for t in (out if isinstance(out, list | tuple) else [out]) if isinstance(t, Tensor)]


def dims_of(args: dict[str, Any], ndim: int) -> list[int]:
    """Return the dimensions, from 0, that an operation works along; all by default."""
    dims = first(args, "dim dims")
    if dims is None or dims == []:
        return list(range(ndim))
    return sorted({dim % max(ndim, 1) for dim in ([dims] if isinstance(dims, int) else dims)})


def fresh(shape: Iterable[int], why: Why | None = None) -> list[Axis]:
    """New axes of these sizes."""
    return [Axis(size, why) for size in shape]


def fitting(axes: Iterable[Axis], shape: Iterable[int]) -> list[Axis]:
    """Return these axes, and new ones where a size differs or there are no more."""
    axes = list(axes)
    return [axes[i] if i < len(axes) and axes[i].size == size else Axis(size) for i, size in enumerate(shape)]


def unify_all(several: Iterable[Sequence[Axis]]) -> None:
    """Unify the axes of several tensors, one by one."""
    whole = list(several)
    for other in whole[1:]:
        for x, y in zip(whole[0], other):
            unify(x, y)


def unify_last(axes: Sequence[Axis], other: Sequence[Axis]) -> None:
    """Unify the last axes of equal size of two tensors, one broadcast to the other."""
    for x, y in zip(reversed(axes), reversed(other)):
        if x.size == y.size:
            unify(x, y)


def broadcast(view: View, operands: Iterable[Tensor], shape: Sequence[int]) -> list[Axis]:
    """Return the axes of tensors that were broadcast against each other."""
    return broadcast_axes([view.axes_of(tensor) for tensor in operands], shape)


def broadcast_axes(operands: Sequence[Sequence[Axis]], shape: Sequence[int]) -> list[Axis]:
    """Return these axes broadcast against each other."""
    result = []
    for position in range(1, len(shape) + 1):
        same = [axes[-position] for axes in operands if len(axes) >= position]
        same = [axis for axis in same if axis.size == shape[-position]]
        for other in same[1:]:
            unify(same[0], other)
        result.append(find(same[0]) if same else Axis(shape[-position]))
    return result[::-1]


def fix_all(
    view: View, operands: Iterable[Tensor], out: Any, why: Why = picked("positions are picked by data")
) -> list[list[Axis]]:
    """Fix all axes, since data or memory decide which positions are picked.

    `why` is the reason of the results' axes.
    """
    for tensor in operands:
        for axis in view.axes_of(tensor):
            fix(axis, picked("positions are picked by data"))
    return [fresh(result.shape, why) for result in results(out)]


def split_groups(axis: Axis, groups: int) -> list[Axis]:
    """Return the two digits of an axis: which group, and which position within it."""
    which, within = regroup([axis], [groups, axis.size // groups])
    mark_grouping(which, "groups")
    return [which, within]


def slide_window(axes: Sequence[Axis], sizes: Sequence[int], window: Sequence[int]) -> tuple[list[Axis], list[Axis]]:
    """Return axes after a sliding window, and axes that must stay without a gap."""
    result, ordered = [], []
    for axis, size, length in zip(axes, sizes, window):
        if axis.size != size:
            fix(axis, role("a window slides over it"))
            axis = Axis(size, place("a window slides over it"))
        elif length > 1:
            ordered.append(axis)
        result.append(axis)
    return result, ordered
