"""Numbers that remember the attributes of a model that they came from.

On a copy of the model the integers and floats among the attributes of modules, and of configurations that they hold,
are replaced by subclasses of `int` and `float` that keep an expression, through arithmetic, until an operation takes
them. What the operation makes of them shows which axis they are the size of, or what they scale.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from surgery.names import named_modules
from surgery.plain import is_settings

Number: TypeAlias = int | float


class Place(NamedTuple):
    """The place of a number: a module's attribute, or an item of one.

    Attributes:
        module: the module's name.
        attribute: its attribute, `config.hidden_size` for one of an object that the module holds.
        item: the entry of a list; None if the attribute is a number.
    """

    module: str
    attribute: str
    item: int | None = None


class Operation(NamedTuple):
    """A number computed from others."""

    apply: Callable[[Any, Any], Number]
    left: "Expression"
    right: "Expression"

    @property
    def length(self) -> int:
        """The number of operations."""
        return 1 + sum(side.length for side in (self.left, self.right) if isinstance(side, Operation))


Expression: TypeAlias = Place | Operation | int | float


def evaluate(expression: Expression, values: Mapping[Place, Number]) -> Number:
    """Return the value of an expression, given the values of the places that it reads.

    >>> width = Place("block", "width")
    >>> evaluate(Operation(operator.mul, width, 3), {width: 5})
    15
    """
    if isinstance(expression, Operation):
        return expression.apply(evaluate(expression.left, values), evaluate(expression.right, values))
    return values[expression] if isinstance(expression, Place) else expression


def _value(expression: Expression, values: Mapping[Place, Number]) -> Number | None:
    """Return the value of an expression; None if it divides by zero."""
    try:
        return evaluate(expression, values)
    except (ZeroDivisionError, OverflowError):
        return None


def places(expression: Expression) -> Iterator[Place]:
    """Yield the places that an expression reads."""
    if isinstance(expression, Operation):
        yield from places(expression.left)
        yield from places(expression.right)
    elif isinstance(expression, Place):
        yield expression


def invert(expression: Expression, unknown: Place, result: Number, values: Mapping[Place, Number]) -> Number | None:
    """Return the value of a place that gives an expression a value, or None.

    >>> width = Place("block", "width")
    >>> three_times = Operation(operator.mul, 3, width)
    >>> invert(three_times, width, 12, {}), invert(three_times, width, 4, {})
    (4, None)
    """
    wanted: Number | None = result
    while isinstance(expression, Operation) and wanted is not None:
        on_left = unknown in places(expression.left)
        if on_left and unknown in places(expression.right):
            return None
        try:
            other = evaluate(expression.right if on_left else expression.left, values)
            wanted = _INVERSES[expression.apply](wanted, other, on_left)
        except (ZeroDivisionError, OverflowError):
            return None
        expression = expression.left if on_left else expression.right
    return wanted


def _undivide(result: Number, other: Number, on_left: bool) -> Number | None:
    return result * other if on_left else None  # a dividend that is not known to be a width may come from a shape


def _unmultiply(result: Number, other: Number, on_left: bool) -> Number | None:
    if isinstance(result, int) and isinstance(other, int):
        return None if result % other else result // other
    return result / other


def _unpower(result: Number, other: Number, on_left: bool) -> Number | None:
    if not on_left:
        return None
    root = result ** (1 / other)
    return round(root) if abs(root - round(root)) < 1e-6 * abs(root) else root


_INVERSES: dict[Callable[..., Number], Callable[[Number, Number, bool], Number | None]] = {
    operator.add: lambda result, other, on_left: result - other,
    operator.sub: lambda result, other, on_left: result + other if on_left else other - result,
    operator.mul: _unmultiply,
    operator.floordiv: _undivide,
    operator.truediv: _undivide,
    operator.mod: lambda result, other, on_left: None,
    operator.pow: _unpower,
}


@dataclass
class Tracking:
    """A trace in which numbers remember where they come from.

    Afterwards numbers that a cache has kept compute plain ones.

    Attributes:
        compared: the expressions of numbers that the code found equal to another one.
        is_open: whether the trace still runs.
    """

    compared: list[Expression] = field(default_factory=list)
    is_open: bool = True


class Tracked:
    """A number that remembers its expression, and in which trace."""

    expression: Expression
    trace: Tracking

    def __reduce__(self) -> Any:
        return (int if isinstance(self, int) else float), (plain(self),)

    def __deepcopy__(self, memo: Any) -> Number:
        return plain(self)

    def __neg__(self) -> Any:
        value: Any = self
        return value * -1

    def __hash__(self) -> int:
        return hash(plain(self))

    def __eq__(self, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        same = plain(self) == plain(other)
        if same and type(other) is int and self.trace.is_open:
            self.trace.compared.append(self.expression)
        return same

    def __ne__(self, other: Any) -> Any:
        return not self == other if isinstance(other, int | float) else NotImplemented


class _Int(Tracked, int):
    __hash__ = Tracked.__hash__


class _Float(Tracked, float):
    __hash__ = Tracked.__hash__


def plain(value: Any) -> Any:
    """Return a number without its memory."""
    return int(value) if isinstance(value, _Int) else float(value) if isinstance(value, _Float) else value


def _track(value: Number, expression: Expression, trace: Tracking) -> Any:
    result = _Int(value) if isinstance(value, int) else _Float(value)
    result.expression, result.trace = expression, trace
    return result


_LONGEST = 50  # operations of an expression


def _length(expression: Expression) -> int:
    return expression.length if isinstance(expression, Operation) else 0


def _lift(apply: Callable[[Any, Any], Any], swap: bool) -> Callable[[Any, Any], Any]:
    def method(self: Tracked, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented  # a tensor: torch sees the number itself
        left, right = (other, self) if swap else (self, other)
        value = apply(plain(left), plain(right))
        if type(value) not in (int, float) or not self.trace.is_open:
            return value
        sides = [side.expression if isinstance(side, Tracked) else side for side in (left, right)]
        if sum(map(_length, sides)) > _LONGEST:
            return value  # a sum over a loop: it could be any width
        return _track(value, Operation(apply, *sides), self.trace)

    return method


for _name in ("add", "sub", "mul", "floordiv", "truediv", "mod", "pow"):
    for _kind in (_Int, _Float):
        setattr(_kind, f"__{_name}__", _lift(getattr(operator, _name), swap=False))
        setattr(_kind, f"__r{_name}__", _lift(getattr(operator, _name), swap=True))


def is_custom(module: nn.Module) -> bool:
    """Return whether a module's numbers are its author's, not torch's own."""
    is_torch = type(module).__module__.startswith("torch.nn.")
    known = isinstance(
        module, _ConvNd | nn.Linear | _NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm | nn.Embedding
    )
    return isinstance(module, nn.Transformer) or not (is_torch or known)


def numbers(model: nn.Module) -> Iterator[tuple[dict[str, Any], str, Place]]:
    """Yield (dict, key, place) of each number or list of numbers in attributes."""
    looked_at: set[int] = set()  # modules share their configuration
    for name, module in named_modules(model):
        if not is_custom(module):
            continue
        for attribute, value in list(vars(module).items()):
            if attribute in _TORCH_S:
                continue
            if _is_numeric(value):
                yield vars(module), attribute, Place(name, attribute)
            elif is_settings(value) and id(value) not in looked_at:
                looked_at.add(id(value))
                for key, item in list(vars(value).items()):
                    if _is_numeric(item):
                        yield vars(value), key, Place(name, f"{attribute}.{key}")


_TORCH_S = vars(nn.Module()).keys()  # attributes that torch keeps in every module


def _is_numeric(value: Any) -> bool:
    if type(value) in (list, tuple):
        return bool(value) and all(type(item) is int for item in value)
    return type(value) in (int, float, np.float64)


def remember(model: nn.Module, trace: Tracking) -> None:
    """Replace a model's numbers, in place, by ones that remember where they were."""
    for holder, key, place in numbers(model):
        value = holder[key]
        if isinstance(value, list | tuple):
            holder[key] = type(value)(
                _track(item, place._replace(item=i), trace) if item > 1 else item for i, item in enumerate(value)
            )
        elif value not in (0, 1):
            holder[key] = _track(float(value) if isinstance(value, np.float64) else value, place, trace)


def find_tracked(arguments: Iterable[Any], trace: Tracking) -> Iterator[Any]:
    """Yield a trace's tracked numbers in a call's arguments, also nested ones."""
    for value in arguments:
        if isinstance(value, Tracked):
            if value.trace is trace:
                yield value
        elif type(value) in (tuple, list):
            yield from find_tracked(value, trace)
        elif type(value) is slice:
            yield from find_tracked((value.start, value.stop, value.step), trace)
        elif type(value) is dict:
            yield from find_tracked(value.values(), trace)


def solve_for_places(
    equations: Sequence[tuple[Expression, Number]],
    values: Mapping[Place, Number],
    is_width: Callable[[Place], bool],
) -> dict[Place, Number]:
    """Return the new values of places, given what expressions become.

    Expressions of one place alone count first. If another expression does not get its new value from what is known, its
    place without a new value gets one. If there are several such places, it is the width that can be computed.

    Args:
        equations: (expression, its new value).
        values: the present values.
        is_width: whether the number at a place is as large as a width that changes.

    >>> width, heads = Place("block", "width"), Place("block", "heads")
    >>> quotient = Operation(operator.floordiv, width, heads)
    >>> solve_for_places([(quotient, 8)], {width: 64, heads: 4}, lambda place: place == width)[width]
    32
    """
    new_values = {expression: result for expression, result in reversed(equations) if isinstance(expression, Place)}
    left = [equation for equation in equations if isinstance(equation[0], Operation)]
    for expression, result in [*left, *left]:  # what one gives another may need
        known = {**values, **new_values}
        unknown = [place for place in dict.fromkeys(places(expression)) if place not in new_values]
        unknown = unknown if len(unknown) == 1 else [place for place in unknown if is_width(place)]
        if _value(expression, known) == result:
            continue
        options = {place: value for place in unknown if (value := _solve(expression, place, result, known)) is not None}
        if len(options) == 1:  # of a quotient the dividend
            new_values |= options
    return new_values


def _solve(expression: Expression, unknown: Place, result: Number, values: Mapping[Place, Number]) -> Number | None:
    """Return a place's value, of its kind, that gives an expression a value; or None."""
    value = invert(expression, unknown, result, values)
    if isinstance(value, float) and isinstance(values[unknown], int):
        value = int(value) if value.is_integer() else None
    solves = value is not None and _value(expression, {**values, unknown: value}) == result
    return value if solves else None
