"""Settings as they are written: nested dataclasses as the plain values of YAML and back, and as flags."""

import dataclasses
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fl.base.errors import FLError
from fl.base.settings import Setting, flag_of, from_yaml


def plain(value: Any) -> Any:
    """A list in the place of a tuple, which YAML does not know."""
    return list(value) if isinstance(value, tuple) else value


def nested(settings: Iterable[Setting]) -> dict[str, Any]:
    """Settings as YAML writes them, those of a group in a mapping of its own."""
    result: dict[str, Any] = {}
    for setting in settings:
        place = result.setdefault(setting.group, {}) if setting.group else result
        place[setting.field.name] = plain(setting.value)
    return result


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
