"""Settings held to what their types say, see `fl.base.flags`: one checker for all of them."""

import math
from collections.abc import Collection
from dataclasses import Field, fields, is_dataclass, replace
from numbers import Integral
from typing import Any, NamedTuple, TypeVar

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


class Setting(NamedTuple):
    """A setting with its value in a dataclass of settings, or in a group of settings within one.

    Attributes:
        group: the name of the group, "" for a setting that is in none.
        role: that of the field, or else of its group.
        unread: why nothing reads it beside these other settings; "" where it is read.
    """

    field: Field
    group: str
    value: Any
    role: Role
    unread: str

    @property
    def name(self) -> str:
        """As it is written in Python: `fedexp.max_step`."""
        return (f"{self.group}." if self.group else "") + self.field.name

    @property
    def flag(self) -> str:
        """As it is written on the command line: `fedexp.max-step`."""
        return flag_of(self.field.name, self.group)


def settings_of(settings: Any, swept: str = "") -> list[Setting]:
    """All settings of a dataclass, those of the groups within included, each with why nothing reads it: the one answer
    to which settings a run reads.

    A setting is read only with what its type says (`OnlyWith`), a group unless the dataclass has a method
    `group_unread(group, swept)` that gives a reason.

    Args:
        swept: the flag that will have several values, one of which may be what another setting needs.

    >>> from fl.federation.attack import AttackOptions
    >>> [setting.flag for setting in settings_of(AttackOptions(share=0.0)) if not setting.unread][:1]
    ['share']
    """
    found = []
    for field in fields(settings):
        value = getattr(settings, field.name)
        if not is_dataclass(value):
            reason = _unread(settings, field, "", swept)
            found.append(Setting(field, "", value, role(field), reason))
            continue
        group = field.name
        whole = settings.group_unread(group, swept) if hasattr(settings, "group_unread") else ""
        for inner in fields(value):
            reason = whole and f"--{flag_of(inner.name, group)} {whole}"
            reason = reason or _unread(value, inner, group, swept)
            kind = next(iter(marks(inner, Role)), role(field))
            found.append(Setting(inner, group, getattr(value, inner.name), kind, reason))
    return found


def _unread(settings: Any, field: Field, group: str, swept: str) -> str:
    """Why nothing reads a setting beside the others of its dataclass, by what it is read with."""
    types = {field.name: field for field in fields(settings)}
    needs = getattr(settings, "needs", {})  # of options whose type does not say it
    for mark in [*marks(field, OnlyWith), *([needs[field.name]] if field.name in needs else [])]:
        other = getattr(settings, mark.setting)
        flag, setting = flag_of(field.name, group), flag_of(mark.setting, group)
        if other not in mark.values and setting != swept:
            return (
                f"--{flag} is for --{setting} {mark.said()}, not for {other}: leave it out, or give --{setting} "
                f"{mark.said()}"
            )
        if reason := _unread(settings, types[mark.setting], group, swept):
            return reason
    return ""


def changed(settings: Any, start: Any) -> list[Setting]:
    """The settings that have another value than in a second dataclass of the same kind."""
    return [now for now, was in zip(settings_of(settings), settings_of(start)) if now.value != was.value]


def check_read(settings: Any, flags: Collection[str], swept: str = "") -> None:
    """Raise FLError for the first of some flags that nothing reads, see `settings_of`."""
    for setting in settings_of(settings, swept):
        if setting.unread and setting.flag in flags:
            raise FLError(setting.unread)


def without_unread(settings: Kind, swept: str = "") -> Kind:
    """The same settings, with the default in the place of each that nothing reads."""
    start = type(settings)()
    usual: dict[str, dict[str, Any]] = {"": {}}
    for one in settings_of(settings, swept):
        if one.unread:
            default = getattr(start, one.group) if one.group else start
            usual.setdefault(one.group, {})[one.field.name] = getattr(default, one.field.name)
    groups = {group: replace(getattr(settings, group), **values) for group, values in usual.items() if group}
    return replace(settings, **usual[""], **groups)
