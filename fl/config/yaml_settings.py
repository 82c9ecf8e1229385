"""Settings as they are written: nested dataclasses as the plain values of YAML and back, and as flags."""

import dataclasses
from dataclasses import replace
from typing import Any

from fl.base.checks import flag_of
from fl.base.errors import FLError
from fl.base.types import from_yaml


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
            result[name] = from_yaml(types[name], value)
        except TypeError:
            raise FLError(f"not the settings of a run: {where}{name} cannot be {value!r}") from None
    return replace(default, **result)
