"""Settings as they are written: nested dataclasses as the plain values of YAML and back, and as flags."""

import dataclasses
from dataclasses import replace
from typing import Annotated, Any, get_args, get_origin

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
        inner = {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
        result |= {key.replace("_", "-"): v for key, v in inner.items()}
    return result


def filled(default: Any, values: Any, where: str) -> Any:
    """A dataclass with the given values, each of the kind that its default has."""
    known = {f.name: getattr(default, f.name) for f in dataclasses.fields(default)}
    kinds = {f.name: f.type for f in dataclasses.fields(default)}
    if not isinstance(values, dict) or (strange := [name for name in values if name not in known]):
        what = f"unknown setting {where}{strange[0]}" if isinstance(values, dict) else f"{where or 'it'} is no mapping"
        raise FLError(f"not the settings of a run: {what}")
    result = {}
    for name, value in values.items():
        old = known[name]
        if dataclasses.is_dataclass(old):
            result[name] = filled(old, value, f"{name}.")
            continue
        if isinstance(old, tuple):
            value = tuple(value) if isinstance(value, list) else (value,)
            hint = kinds[name]  # tuple[kind, ...], or that annotated
            kind = get_args(get_args(hint)[0] if get_origin(hint) is Annotated else hint)[0]
            value = tuple(float(v) if kind is float and type(v) is int else v for v in value)
            fits = all(type(item) is kind for item in value)
        elif name == "dropout":
            fits = value is None or type(value) in (int, float)
        elif old is None:
            fits = value is None or isinstance(value, str)
        else:
            number = isinstance(old, float) or name == "participants"
            fits = type(value) is type(old) or (number and type(value) in (int, float))
        if not fits:
            raise FLError(f"not the settings of a run: {where}{name} cannot be {value!r}")
        result[name] = float(value) if isinstance(old, float) else value
    return replace(default, **result)
