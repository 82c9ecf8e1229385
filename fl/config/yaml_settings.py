"""Settings as they are written: nested dataclasses as the plain values of YAML and back, and as flags."""

import dataclasses
from dataclasses import replace
from types import NoneType, UnionType
from typing import Annotated, Any, get_args, get_origin

from fl.base.checks import flag_of
from fl.base.errors import FLError


def with_lists(values: Any) -> Any:
    """Lists in the place of tuples, which YAML does not know."""
    if isinstance(values, dict):
        return {name: with_lists(value) for name, value in values.items()}
    return list(values) if isinstance(values, tuple) else values


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Flags and values, those of methods as `method.option`."""
    result = {}
    for name, value in values.items():
        if isinstance(value, dict):
            result |= {flag_of(option, name): inner for option, inner in value.items()}
        else:
            result[flag_of(name)] = value
    return result


def filled(default: Any, values: Any, where: str) -> Any:
    """A dataclass with the given values, each of the type that its field has."""
    types = {field.name: field.type for field in dataclasses.fields(default)}
    if not isinstance(values, dict):
        raise FLError(f"not the settings of a run: {where or 'it'} is not a mapping")
    if strange := [name for name in values if name not in types]:
        raise FLError(f"not the settings of a run: unknown setting {where}{strange[0]}")
    result = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(old := getattr(default, name)):
            result[name] = filled(old, value, f"{name}.")
            continue
        try:
            result[name] = _of_type(types[name], value)
        except TypeError:
            raise FLError(f"not the settings of a run: {where}{name} cannot be {value!r}") from None
    return replace(default, **result)


def _of_type(kind: Any, value: Any) -> Any:
    """A value of YAML as the one that a type has: a whole number may stand for a float, a list for a tuple, and a
    single value for a tuple of one. TypeError for one that the type does not have.

    >>> _of_type(tuple[float, ...], [1, 0.5]), _of_type(int | float, 3), _of_type(float | None, 3)
    ((1.0, 0.5), 3, 3.0)
    """
    if get_origin(kind) is Annotated:
        return _of_type(get_args(kind)[0], value)
    if get_origin(kind) is tuple:
        items = value if isinstance(value, list) else [value]
        return tuple(_of_type(get_args(kind)[0], item) for item in items)
    kinds = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if type(value) in kinds:
        return value
    if type(value) is int and float in kinds:
        return float(value)
    if value is None and NoneType in kinds:
        return None
    raise TypeError
