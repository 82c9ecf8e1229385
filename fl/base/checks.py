"""Settings held to what their types say, see `fl.base.flags`: one checker for all of them."""

import math
from collections.abc import Iterator
from dataclasses import Field, fields, is_dataclass
from numbers import Integral
from typing import Any, TypeVar

from fl.base.errors import FLError
from fl.base.flags import Flag, OnlyWith, Role, as_tuple, written
from fl.base.types import fits, options_of, said

Kind = TypeVar("Kind")

LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which models compute


def marks(field: Field, kind: type[Kind]) -> list[Kind]:
    """What a field's type says of it, of one kind: `lr: Annotated[float, number(float, above=0)]` has one Flag."""
    return [mark for mark in getattr(field.type, "__metadata__", ()) if isinstance(mark, kind)]


def role(field: Field) -> Role:
    """What a field is for."""
    return next(iter(marks(field, Role)), Role())


def flag_of(name: str, group: str = "") -> str:
    """A setting's flag, without its dashes.

    >>> flag_of("max_step", "fedexp")
    'fedexp.max-step'
    """
    return (f"{group}." if group else "").replace("_", "-") + name.replace("_", "-")


def check_values(settings: Any, group: str = "") -> None:
    """Raise FLError for the first value that its setting cannot have, in the groups of settings within, too.

    Args:
        settings: a dataclass.
        group: what its flags begin with.
    """
    for field in fields(settings):
        value = getattr(settings, field.name)
        if is_dataclass(value):
            check_values(value, field.name)
            continue
        flag = flag_of(field.name, group)
        if options_of(field.type) and not fits(field.type, value):
            raise FLError(f"--{flag} must be {said(field.type)}, got {value!r}")
        if any(isinstance(item, float) and not math.isfinite(item) for item in as_tuple(value)):
            raise FLError(f"--{flag} must be a finite number, got {written(value)}")
        for mark in marks(field, Flag):
            mark.check(flag, value)
        for item in as_tuple(value):
            if isinstance(item, Integral) and abs(item) >= 2**63:
                raise FLError(f"--{flag} must be below 2^63, got {item}")
            if isinstance(item, float) and abs(item) > LARGEST:
                raise FLError(f"--{flag} must be at most {LARGEST:.3g}, which a float32 holds, got {item}")


def check_types(settings: Any) -> None:
    """Raise FLError for a field whose type is none that settings can have, so that YAML and flags can hold it."""
    for field in fields(settings):
        if not options_of(field.type):
            raise FLError(
                f"{type(settings).__name__}.{field.name} has the type {field.type!r}, which settings cannot have: use "
                "int, float, str or bool, X | None, tuple[X, ...], or Annotated with the values that there are (see "
                "fl/base/flags.py); and leave `from __future__ import annotations` out of its file"
            )


def unread(settings: Any, name: str, group: str = "", swept: str = "") -> str:
    """Why nothing reads a setting beside the others of its dataclass; "" where it is read.

    Args:
        swept: the flag that will have several values, one of which may be what this setting needs.

    >>> from fl.federation.attack import AttackOptions
    >>> unread(AttackOptions(share=0.0), "amplify", "attack")
    '--attack.amplify is for --attack.share above 0, not for 0.0: leave it out, or give --attack.share above 0'
    """
    types = {field.name: field for field in fields(settings)}
    needs = getattr(settings, "needs", {})  # of options whose type does not say it
    for mark in [*marks(types[name], OnlyWith), *([needs[name]] if name in needs else [])]:
        other = getattr(settings, mark.setting)
        flag, setting = flag_of(name, group), flag_of(mark.setting, group)
        if other not in mark.values and setting != swept:
            return (
                f"--{flag} is for --{setting} {mark.said()}, not for {other}: leave it out, or give --{setting} "
                f"{mark.said()}"
            )
        if reason := unread(settings, mark.setting, group, swept):
            return reason
    return ""


def changed(settings: Any, start: Any) -> Iterator[str]:
    """The names of the fields in which two dataclasses of one kind differ."""
    for field in fields(settings):
        if getattr(settings, field.name) != getattr(start, field.name):
            yield field.name


def check_read(settings: Any, start: Any, group: str = "", swept: str = "") -> None:
    """Raise FLError for a setting that was changed from `start` while nothing reads it, see `unread`."""
    for name in changed(settings, start):
        value = getattr(settings, name)
        if is_dataclass(value):
            check_read(value, getattr(start, name), name, swept)
        elif reason := unread(settings, name, group, swept):
            raise FLError(reason)
