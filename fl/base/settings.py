"""Settings: how a value is written as a flag, which values are valid, the check.

lr: Above0 = 0.02
decay: Annotated[float, number(float, above=0, most=1)] = 0.98
optimizer: Annotated[str, one_of("sgd", "adam")] = "sgd"
momentum: Annotated[AtLeast0, OnlyWith("optimizer", "sgd")] = 0.9
"""

import difflib
import math
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, fields, is_dataclass, replace
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin

import numpy as np
from tyro.constructors import PrimitiveConstructorSpec

from fl.base.errors import FLError

T = TypeVar("T")

LARGEST = (2 - 2**-23) * 2.0**127  # of float32, in which models compute
_MANY = 20  # names, more than one reads through
_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "none"}


@dataclass(frozen=True)
class Bounds:
    """Numbers between bounds that count (`least`, `most`) or do not (`above`, `below`).

    Attributes:
        zero: whether 0, which then stands for "none", is allowed as well.

    >>> 0.5 in Bounds(above=0, most=1), 0 in Bounds(above=0, most=1), math.nan in Bounds()
    (True, False, False)
    >>> print(Bounds(above=0, most=1))
    above 0 and at most 1
    """

    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    zero: bool = False

    def __contains__(self, value: object) -> bool:
        if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
            return False
        inside = (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )
        return inside or (self.zero and value == 0)

    def __str__(self) -> str:
        words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        bounds = [f"{word} {bound}" for word, bound in words.items() if bound is not None]
        text = " and ".join(bounds)
        if self.least is not None and len(bounds) == 1:
            text = f"{self.least} or more"
        elif self.least is not None and self.most is not None:
            text = f"between {self.least} and {self.most}"
        return text + ", or 0" * self.zero

    def around(self, word: str) -> str:
        """Write the limits as a formula, for --help.

        >>> Bounds(least=0, below=1).around("FLOAT"), Bounds(least=1).around("INT")
        ('0<=FLOAT<1', 'INT>=1')
        """
        lower, less = (self.above, "<") if self.least is None else (self.least, "<=")
        upper = f"<={self.most}" if self.most is not None else f"<{self.below}" * (self.below is not None)
        if lower is not None:
            word = f"{lower}{less}{word}" if upper else f"{word}{less.replace('<', '>')}{lower}"
        return word + upper + "|0" * self.zero


@dataclass(frozen=True)
class OnlyWith:
    """Says that a setting is read only while another of its group has these values.

    >>> print(OnlyWith("optimizer", "sgd", "adam"), OnlyWith("share", Bounds(above=0)), sep=", ")
    sgd or adam, above 0
    """

    setting: str
    values: tuple[Any, ...] | Bounds

    def __init__(self, setting: str, *values: Any) -> None:
        object.__setattr__(self, "setting", setting)
        object.__setattr__(self, "values", values[0] if isinstance(values[0], Bounds) else values)

    def __str__(self) -> str:
        return str(self.values) if isinstance(self.values, Bounds) else " or ".join(map(str, self.values))


@dataclass(frozen=True)
class Named:
    """A setting's name in commands and `Config.of`, if it is not its field's name."""

    name: str


@dataclass(frozen=True)
class Alternative:
    """One of several named alternatives, with the options that it alone reads.

    >>> Alternative("iid")
    Alternative(name='iid', options=None)
    """

    name: str
    options: Any = None


@dataclass(frozen=True)
class Alternatives:
    """Says what a setting that is an `Alternative` can be.

    Attributes:
        options: () -> from the name of each alternative to its default options, or None if it has none.
        prefixed: whether flags of options begin with the name of the alternative: `--fedmr.unit`, but `--alpha`.
    """

    options: Callable[[], Mapping[str, Any]]
    prefixed: bool = False


@dataclass(frozen=True)
class About:
    """Says what a setting is, in words that are put together on demand."""

    words: Callable[[], str]

    @property
    def help(self) -> str:
        """The words, under the name that tyro's notes have."""
        return self.words()


@dataclass(frozen=True)
class Rare:
    """Says that a setting is seldom needed, so that only `--help all` shows it."""


class Default(int):
    """A number left at its default, which may follow others; it equals the plain one."""

    def at_most(self, number: int) -> "Default":
        """Lower it to a number.

        >>> Default(5).at_most(3), Defaults(("global", "5")).at_most(3)
        (3, ('global', '3'))
        """
        return Default(min(self, number))


class Defaults(tuple):
    """Several values left at their defaults, some of them numbers, or words for these."""

    def at_most(self, number: int) -> "Defaults":
        """Lower each of its numbers to a number."""
        counts = (isinstance(value, int) or value.isdecimal() for value in self)
        return Defaults(type(v)(min(int(v), number)) if is_count else v for v, is_count in zip(self, counts))


class Flag(PrimitiveConstructorSpec):
    """The written form of a setting, with the values that it may have.

    Attributes:
        items: what a value may be (each item of a tuple): Limits, names, or None for any.
        own: see `choice`.
    """

    items: Container | Iterable | None
    own: str

    def __init__(
        self,
        parse: Callable[[str], Any],
        metavar: str,
        items: Container | Iterable | None = None,
        write: Callable[[Any], str] | None = None,
        own: str = "",
    ) -> None:
        super().__init__(
            nargs=1,
            metavar=metavar,
            instance_from_str=lambda words: parse(words[0]),
            is_instance=lambda _: True,  # `check_values` says what is wrong, also in Python and YAML
            str_from_instance=lambda value: [(write or write_value)(value)],
        )
        object.__setattr__(self, "items", items)
        object.__setattr__(self, "own", own)


def as_tuple(value: Any) -> tuple:
    """Return a tuple as it is, and any other value as a tuple of one item."""
    return value if isinstance(value, tuple) else (value,)


def as_plain(value: Any) -> Any:
    """Turn NumPy's numbers and tuples into Python's, which files can hold.

    Also in tuples and in groups of settings.

    >>> as_plain((np.float64(0.5), np.int32(2))), as_plain(np.arange(2)), as_plain("sgd")
    ((0.5, 2), (0, 1), 'sgd')
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
        return tuple(value) if isinstance(value, list) else value
    if type(value) in (tuple, list):
        return type(value)(map(as_plain, value))
    if is_dataclass(value) and not isinstance(value, type):
        values = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
        plain = {name: as_plain(inner) for name, inner in values.items()}
        return replace(value, **plain) if any(plain[name] is not values[name] for name in values) else value
    return value


def lower_defaults(settings: T, number: int) -> T:
    """Lower settings that are left at their defaults to a number."""
    unset = (field.name for field in fields(settings) if isinstance(getattr(settings, field.name), Default | Defaults))  # type: ignore[arg-type]
    return replace(settings, **{name: getattr(type(settings), name).at_most(number) for name in unset})  # type: ignore[type-var]


def write_value(value: Any) -> str:
    """Write a value as a flag takes it."""
    return ",".join(map(str, as_tuple(value)))


def _parse(kind: type, word: str) -> Any:
    try:
        return kind(word)
    except ValueError:
        raise ValueError(f"{word!r} is not {_WORDS.get(kind, 'a value')}") from None


def number(kind: type, metavar: str = "", **limits: Any) -> Flag:
    """Make the flag of a number within limits, see `Bounds`."""
    within = Bounds(**limits)
    return Flag(lambda word: _parse(kind, word), metavar or within.around(kind.__name__.upper()), within)


def one_of(*names: str) -> Flag:
    """Make the flag of one of several names.

    If they take more than a line of the help, its text has to list them.
    """
    every = "{" + ",".join(names) + "}"
    return Flag(str, every if len(every) < 60 else "NAME", names)


def several(kind: type, metavar: str, empty: str = "", items: Any = None, own: str = "", **limits: Any) -> Flag:
    """Make the flag of several values, comma-separated.

    Args:
        empty: what stands for none of them.
        items: the names that there are; numbers have limits instead.
        own: see `choice`.
    """

    def parse(text: str) -> tuple:
        words = [word.strip() for word in text.split(",")]
        if words in ([empty], [""]):
            return ()
        if "" in words:
            raise ValueError(f"{text!r} has an empty item: write one comma between two items, and none at the end")
        return tuple(_parse(kind, word) for word in words)

    return Flag(parse, metavar, Bounds(**limits) if limits else items, lambda value: write_value(value) or empty, own)


AtLeast1 = Annotated[int, number(int, least=1)]
Natural = Annotated[int, number(int, least=0)]
Above0 = Annotated[float, number(float, above=0)]
AtLeast0 = Annotated[float, number(float, least=0)]
Share = Annotated[float, number(float, least=0, most=1)]

Names = Annotated[tuple[str, ...], several(str, "NAME,...")]
Integers = Annotated[tuple[int, ...], several(int, "INT,...")]
Depths = Annotated[tuple[int, ...], several(int, "INT,...", empty="all")]
Blocks = Annotated[tuple[str, ...], several(str, "INT[-INT...],...", empty="own")]
Rates = Annotated[tuple[float, ...], several(float, "FLOAT,...")]
Lengths = Annotated[tuple[int, ...], several(int, "INT,...", empty="converged")]
Sizes = Annotated[tuple[int, ...], several(int, "INT,...", empty="auto")]


def choice(label: str, values: Iterable[str], valid: Container | Iterable, own: str = "") -> None:
    """Raise FLError for the first invalid value.

    It names the valid ones, or the nearest of many.

    Args:
        own: how a user's own module names what it has, if an import path is a value as well.

    >>> choice("fruit", ["aple"], ["apple", "pear"])
    Traceback (most recent call last):
    fl.base.errors.FLError: unknown fruit 'aple': did you mean apple? there are apple, pear
    """
    for value in values:
        if isinstance(value, str) and value in valid:
            continue
        module = str(value).removesuffix(".py")
        if own and module.isidentifier() and Path(f"{module}.py").is_file():
            raise FLError(f"unknown {label} {value!r}: give {module}:{own}, the {own} in {module}.py", code="name")
        names = [*valid] if isinstance(valid, Iterable) else []
        near = difflib.get_close_matches(value, names, n=1) if isinstance(value, str) else []
        hint, every = "".join(f"did you mean {match}? " for match in near), f"there are {', '.join(names)}"
        every += f"; your own: module:{own}" if own else ""
        raise FLError(
            f"unknown {label} {value!r}: {hint if near and len(names) > _MANY else hint + every}".rstrip(), code="name"
        )


def types_of(kind: Any) -> tuple[tuple[Any, ...], bool]:
    """Return the plain types that a type allows, and whether it is a tuple of them.

    There are none for a type that settings cannot have.

    >>> types_of(Annotated[float | None, "a note"]), types_of(tuple[str, ...]), types_of("float")
    (((<class 'float'>, <class 'NoneType'>), False), ((<class 'str'>,), True), ((), False))
    """
    return _types_of(get_args(kind)[0] if get_origin(kind) is Annotated else kind)


@cache
def _types_of(kind: Any) -> tuple[tuple[Any, ...], bool]:
    many = get_origin(kind) is tuple
    if many:
        kind, *rest = get_args(kind)
        if rest != [...]:
            return (), True
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return kinds if all(isinstance(part, type) and part in _WORDS for part in kinds) else (), many


def fits(kind: Any, value: Any) -> bool:
    """Return whether a value has a type.

    NumPy's numbers count as numbers, whole ones as floats, truth values not.

    >>> fits(float, 1), fits(int, 1.0), fits(int, True), fits(tuple[str, ...], ["a"]), fits(bool | None, None)
    (True, False, False, False, True)
    """
    plain, many = types_of(kind)
    kinds = tuple({int: Integral, float: Real}.get(part, part) for part in plain)
    if many and not isinstance(value, tuple):
        return False
    items = value if many else (value,)
    return all(isinstance(item, kinds) and (bool in kinds or not isinstance(item, bool)) for item in items)


_POWER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


def from_yaml(kind: Any, value: Any) -> Any:
    """Convert a value of YAML to a type: a list or a single value stands for a tuple.

    Raises TypeError for a value that the type does not have.

    >>> from_yaml(tuple[float, ...], [1, 0.5]), from_yaml(int | float, 3), from_yaml(float | None, 3)
    ((1.0, 0.5), 3, 3.0)
    >>> from_yaml(float, "1e-3")
    0.001
    """
    kinds, many = types_of(kind)
    items = tuple(value) if many and isinstance(value, list) else (value,)
    if float in kinds and str not in kinds:  # YAML 1.1 takes 1e-3 for text, since it has no point
        items = tuple(float(item) if isinstance(item, str) and _POWER.fullmatch(item) else item for item in items)
        value = value if many else items[0]
    if not fits(kind, items if many else value):
        raise TypeError
    if float in kinds and int not in kinds:
        items = tuple(item if item is None else float(item) for item in items)
    return items if many else items[0]


def marks(field: Field, kind: type[T]) -> list[T]:
    """List the marks of one kind in a field's type.

    `lr: Annotated[float, number(float, above=0)]` has one Flag.
    """
    return [mark for mark in getattr(field.type, "__metadata__", ()) if isinstance(mark, kind)]


def name_of(field: Field) -> str:
    """Return what a setting is called outside its dataclass, see `Named`."""
    return next((mark.name for mark in marks(field, Named)), field.name)


def flag_of(name: str, group: str = "") -> str:
    """Write the flag of a setting, without its dashes: `fedexp.max-step`."""
    return (f"{group}.{name}" if group else name).replace("_", "-")


def flag_in(word: str) -> str:
    """Return the flag that a word of a command line names, without dashes, or "".

    >>> flag_in("--fedmr.stage1_rounds=3"), flag_in("--no-flip"), flag_in("3")
    ('fedmr.stage1-rounds', 'flip', '')
    """
    name = word.partition("=")[0].replace("_", "-")
    return name[2:].removeprefix("no-").replace(".no-", ".") if name.startswith("--") else ""


def describe_type(kind: Any) -> str:
    """Say what a value of a type is.

    >>> describe_type(int), describe_type(tuple[int, ...])
    ('a whole number', 'a list, each item a whole number')
    """
    kinds, many = types_of(kind)
    return "a list, each item " * many + " or ".join(_WORDS[part] for part in kinds)


def check_values(settings: Any, group: str = "") -> None:
    """Raise FLError for the first value that its setting cannot have.

    It looks at a dataclass and at the groups of settings within; `group` is what its flags begin with.
    """
    for setting in settings_of(settings, group):
        check_value(setting)


def check_value(setting: "Setting") -> None:
    """Raise FLError for a value that a setting cannot have."""
    field, value, flag = setting.field, setting.value, setting.flag
    if is_dataclass(field.default) and not isinstance(
        field.default, Alternative
    ):  # of a group, which has its own settings
        raise FLError(f"--{flag} takes {type(field.default).__name__}, got {value!r}")
    for several in marks(field, Alternatives):
        choice(f"--{flag}", [value], several.options())
    kinds, _ = types_of(field.type)
    if kinds and not fits(field.type, value):
        raise FLError(f"--{flag} must be {describe_type(field.type)}, got {value!r}")
    items = as_tuple(value)
    for item in items:
        if isinstance(item, float) and not math.isfinite(item):
            raise FLError(f"--{flag} must be a finite number, got {write_value(value)}")
        if isinstance(item, float) and abs(item) > LARGEST:
            raise FLError(f"--{flag} must be at most {LARGEST:.3g}, which a float32 holds, got {item}")
    for mark in marks(field, Flag):
        if isinstance(mark.items, Bounds):
            if any(item not in mark.items for item in items):
                raise FLError(f"--{flag} must be {mark.items}, got {write_value(value)}")
        elif mark.items is not None:
            choice(f"--{flag}", items, mark.items, mark.own)
    for item in items:
        if isinstance(item, Integral) and abs(item) >= 2**63:
            raise FLError(f"--{flag} must be below 2^63, got {item}")


def check_types(settings: Any) -> None:
    """Raise FLError for a field whose type cannot be a setting's, in YAML and flags."""
    for field in fields(settings):
        if not types_of(field.type)[0]:
            raise FLError(
                f"{type(settings).__name__}.{field.name} has the type {field.type!r}, which settings cannot have: use "
                "int, float, str or bool, X | None, tuple[X, ...], or Annotated with the values that there are (see "
                "fl/base/settings.py); and leave `from __future__ import annotations` out of its file"
            )


class Setting(NamedTuple):
    """A setting with its value.

    Attributes:
        group: what its flag begins with, the name of a group of settings or of a method; "" for a setting in none.
        path: the names of the fields that lead to it.
        unread: why nothing reads it beside these other settings; "" where it is read.
    """

    field: Field
    group: str
    value: Any
    path: tuple[str, ...]
    unread: str

    @property
    def name(self) -> str:
        """The name as `Config.of` has it, after its group's name: `fedexp.max_step`."""
        return (f"{self.group}." if self.group else "") + name_of(self.field)

    @property
    def flag(self) -> str:
        """The name as the command line writes it: `fedexp.max-step`."""
        return flag_of(self.name)


def settings_of(settings: Any, group: str = "", path: tuple[str, ...] = (), why: str = "") -> Iterator[Setting]:
    """Yield the settings of a dataclass and its groups, and why nothing reads each.

    This is the one answer to which settings a run reads. A setting is read only with what its type says (`OnlyWith`), a
    group unless the dataclass has a method `group_unread(group)` that gives a reason.

    Args:
        group: what flags begin with.
        path: the fields that lead to the dataclass.
        why: why nothing reads any of them.
    """
    for field in fields(settings):
        value, place = getattr(settings, field.name), (*path, field.name)
        if isinstance(value, Alternative):
            yield Setting(field, group, value.name, place, why)
            if value.options is not None:
                (several,) = marks(field, Alternatives)
                yield from settings_of(value.options, value.name if several.prefixed else group, place, why)
        elif is_dataclass(value) and isinstance(value, type(field.default)):
            whole = settings.group_unread(field.name) if hasattr(settings, "group_unread") else ""
            yield from settings_of(value, field.name, place, whole)
        else:
            reason = f"--{flag_of(name_of(field), group)} {why}" if why else _unread(settings, field, group)
            yield Setting(field, group, value, place, reason)


def _unread(settings: Any, field: Field, group: str) -> str:
    """Say why nothing reads a setting beside others of its dataclass; "" if read."""
    types = {field.name: field for field in fields(settings)}
    for mark in marks(field, OnlyWith):
        needed = types[mark.setting]
        other = getattr(settings, mark.setting)
        flag, setting = flag_of(name_of(field), group), flag_of(name_of(needed), group)
        if other not in mark.values:
            return f"--{flag} is for --{setting} {mark}, not for {other}: leave it out, or give --{setting} {mark}"
        if reason := _unread(settings, needed, group):
            return reason
    return ""


def as_read(settings: T) -> T:
    """Replace each setting that nothing reads by its default, also in groups within."""
    usual = type(settings)()
    changes: dict[str, Any] = {}
    for field in fields(settings):  # type: ignore[arg-type]  # T is a dataclass
        value = getattr(settings, field.name)
        if isinstance(value, Alternative):
            changes[field.name] = replace(value, options=value.options and as_read(value.options))
        elif is_dataclass(value):
            unread = hasattr(settings, "group_unread") and settings.group_unread(field.name)
            changes[field.name] = getattr(usual, field.name) if unread else as_read(value)
        elif _unread(settings, field, ""):
            changes[field.name] = getattr(usual, field.name)
    return replace(settings, **changes)
