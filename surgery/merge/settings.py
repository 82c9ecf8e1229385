"""Settings of a merge: a number, or numbers by patterns of tensor names."""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor

from surgery.errors import SurgeryError
from surgery.width.choose import matches

ByName: TypeAlias = float | Mapping[str, float]
"""A number for all tensors, or numbers by patterns of names, of which the first that matches counts."""
Weights: TypeAlias = Sequence[float] | Tensor | Mapping[str, Sequence[float]] | None
"""A weight for each model, or lists of them by patterns of tensor names; None gives all models the weight 1."""


def within(name: str, value: ByName, low: float, high: float, *, open_low: bool = False) -> ByName:
    """The setting; SurgeryError unless all of its numbers are between `low` and `high`, which belong to the range.

    >>> within("density", {"*": 0.5}, 0, 1)
    {'*': 0.5}
    """
    for key, number in value.items() if isinstance(value, Mapping) else [("", value)]:
        where = f" for {key!r}" if key else ""
        if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
            raise SurgeryError(f"{name}={number!r}{where} is no finite number: give one, or numbers by name of tensors")
        if not low <= number <= high or (open_low and number == low):
            above = "above" if open_low else "at least"
            limit = "" if high == math.inf else f" and at most {high:g}"
            raise SurgeryError(f"{name}={number:g}{where} is out of range: give {above} {low:g}{limit}")
    return value


def switch(name: str, value: Any) -> bool:
    """The setting; SurgeryError unless it is true or false.

    >>> switch("normalize", False)
    False
    """
    if not isinstance(value, bool):
        raise SurgeryError(f"{name}={value!r}: give true or false, without quotes")
    return value


def of_tensor(name: str, value: Any, default: Any) -> Any:
    """What a setting is for one tensor.

    >>> of_tensor("layer1.conv.weight", {"layer1": 0.2, "*": 0.5}, 1.0), of_tensor("fc.bias", {"layer1": 0.2}, 1.0)
    (0.2, 1.0)
    """
    if not isinstance(value, Mapping):
        return value
    return next((found for pattern, found in value.items() if matches(name, pattern)), default)


def check_patterns(setting: str, value: Any, names: Iterable[str]) -> None:
    """SurgeryError if a setting has a pattern that matches no tensor."""
    if not isinstance(value, Mapping):
        return
    names = list(names)
    for pattern in value:
        if not isinstance(pattern, str):
            raise SurgeryError(f"{setting} has {pattern!r} as a pattern of tensor names: give a text such as 'layer4'")
        if not any(matches(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"names are such as {names[0]!r}"
            raise SurgeryError(f"{setting}: no tensor matches {pattern!r}: {hint}")


def weight_list(weights: Weights, k: int, names: Iterable[str]) -> list[float] | dict[str, list[float]]:
    """Weights as lists of k floats, one for all tensors or by pattern; SurgeryError if they are no k finite numbers."""
    if isinstance(weights, Mapping):
        check_patterns("weights", weights, names)
        return {pattern: _numbers(row, k, f" for {pattern!r}") for pattern, row in weights.items()}
    return [1.0] * k if weights is None else _numbers(weights, k, "")


def _numbers(row: Any, k: int, where: str) -> list[float]:
    try:
        numbers = [float(weight) for weight in (row.tolist() if isinstance(row, Tensor) else row)]
    except (TypeError, ValueError):
        raise SurgeryError(f"weights{where} must be {k} numbers, one for each model, got {repr(row)[:60]}") from None
    if len(numbers) != k or not all(map(math.isfinite, numbers)):
        raise SurgeryError(f"weights{where} must be {k} finite numbers, one for each model, got {numbers}")
    return numbers
