"""Numbers that the code puts into tensors: `torch.tensor(self.width)`, and roots.

They scale what they are multiplied with as plain numbers do. On the meta device a tensor does not say which number it
holds, so that each is noted where it is made.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from surgery.width.by_tensor import ByTensor
from surgery.width.provenance import Number, Tracked
from surgery.width.rules.registry import operation_name, rule_for

_GIVEN = {
    "tensor": (0, "data"),
    "as_tensor": (0, "data"),
    "asarray": (0, "obj"),
    "scalar_tensor": (0, "s"),
    "new_tensor": (1, "data"),
    "full": (1, "fill_value"),
    "full_like": (1, "fill_value"),
    "fill": (1, "value"),
    "fill_": (1, "value"),
    "new_full": (2, "fill_value"),
}
"""By function the place and the name of the argument that says the number."""
_ONES = {"ones", "ones_like", "new_ones"}
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1}
_PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
}


class Wrapped:
    """The numbers in tensors that the code has made of one number."""

    def __init__(self) -> None:
        self._of = ByTensor[Number]()

    def create(self, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """Note and return the number that a function turns into a tensor, or None."""
        name = getattr(function, "__name__", "")
        number = _number(name, args, kwargs) if name in _GIVEN else None
        if number is not None and isinstance(result, Tensor):
            self._of[result] = number
        return number

    def follow(self, operation: Any, bound: Mapping[str, Any], inputs: Sequence[Tensor], results: list[Tensor]) -> None:
        """Note which number an operation's results hold; `bound` names its arguments."""
        name = operation_name(operation)
        if not (self._of or name in _GIVEN or name in _ONES or name == "lift_fresh"):
            return
        number = self._compute(name, operation, bound, inputs)
        changed = {_memory(tensor) for tensor in results} if operation._schema.is_mutable else ()
        for tensor in [other for other in self._of if _memory(other) in changed] if changed else ():
            del self._of[tensor]
        self._of.update(dict.fromkeys(results, number) if number is not None else {})

    def _compute(self, name: str, operation: Any, bound: Mapping[str, Any], inputs: Sequence[Tensor]) -> Number | None:
        if name in _ONES:
            return 1
        if name in _GIVEN:
            return _number(name, (), bound)
        if name == "lift_fresh" and inputs[0].device.type == "cpu" and inputs[0].numel() == 1:
            return inputs[0].item()
        rule = rule_for(operation)
        if rule and rule.carries and (len(inputs) == 1 or name == "copy"):
            return self._of.get(inputs[-1])
        if not self.holds(inputs):
            return None
        values = [self._of.get(value) if isinstance(value, Tensor) else value for value in bound.values()]
        try:
            if name in _POWERS:
                result = values[0] ** _POWERS[name]
            elif name == "neg":
                result = -values[0]
            elif name in _PAIRS and bound.get("alpha", 1) == 1 and not bound.get("rounding_mode"):
                result = _PAIRS[name](*values[:2])
            else:
                return None
        except (ArithmeticError, TypeError):
            return None
        return result if isinstance(result, int | float) else None

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether all of some tensors hold numbers of the code."""
        return bool(tensors) and all(tensor in self._of for tensor in tensors)

    def scales(self, operation: Any, bound: Mapping[str, Any], inputs: Sequence[Tensor]) -> dict[str, Number]:
        """Return by name the numbers by which an operation scales another tensor."""
        if not self._of or operation_name(operation) not in ("mul", "div") or self.holds(inputs):
            return {}
        held = {key: self._of.get(value) for key, value in bound.items() if isinstance(value, Tensor)}
        return {key + ITEM: number for key, number in held.items() if number is not None}


ITEM = ".item"
"""What a step adds to the name of an argument that is a tensor, for the number in it."""


class Wrapping(TorchFunctionMode):
    """Notes which tensors functions make of numbers."""

    def __init__(self, wrapped: Wrapped):
        super().__init__()
        self.wrapped = wrapped

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.wrapped.create(func, args, kwargs or {}, result)
        return result


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _number(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Number | None:
    place, key = _GIVEN[name]
    value = args[place] if len(args) > place else kwargs.get(key)
    while type(value) in (list, tuple) and len(value) == 1:
        value = value[0]
    if isinstance(value, Tracked) or type(value) in (int, float):
        return value  # type: ignore[return-value]
    return float(value) if isinstance(value, Real) and not isinstance(value, bool) else None
