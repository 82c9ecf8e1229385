"""Kinds of settings: how a value is written as a flag, and which values there are. `fl.base.checks` holds them.

lr: Above0 = 0.02
decay: Annotated[float, number(float, above=0, most=1)] = 0.98
optimizer: Annotated[str, one_of("sgd", "adam")] = "sgd"
momentum: Annotated[AtLeast0, OnlyWith("optimizer", "sgd")] = 0.9
"""

import math
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

from fl.base.errors import FLError


@dataclass(frozen=True)
class Limits:
    """The numbers between two bounds, each of which is among them (`least`, `most`) or not (`above`, `below`).

    Attributes:
        zero: whether 0, which then stands for "none", is allowed as well.

    >>> 0.5 in Limits(above=0, most=1), 0 in Limits(above=0, most=1), math.nan in Limits()
    (True, False, False)
    >>> print(Limits(above=0, most=1))
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
        if self.least is not None and self.most is not None:
            return f"between {self.least} and {self.most}" + ", or 0" * self.zero
        upper = f"at most {self.most}" if self.most is not None else f"below {self.below}" * (self.below is not None)
        lower = f"above {self.above}" if self.above is not None else f"at least {self.least}" * (self.least is not None)
        if lower and not upper and self.least is not None:
            lower = f"{self.least} or more"
        return " and ".join(filter(None, (lower, upper))) + ", or 0" * self.zero

    def around(self, word: str) -> str:
        """The limits as a formula, for --help.

        >>> Limits(least=0, below=1).around("FLOAT")
        '0<=FLOAT<1'
        >>> Limits(least=1).around("INT")
        'INT>=1'
        """
        lower = f"{self.least}<=" if self.least is not None else f"{self.above}<" * (self.above is not None)
        upper = f"<={self.most}" if self.most is not None else f"<{self.below}" * (self.below is not None)
        if lower and not upper:
            word, lower = word + {"<=": ">=", "<": ">"}[lower.lstrip("-.0123456789")] + lower.rstrip("<="), ""
        return lower + word + upper + "|0" * self.zero


@dataclass(frozen=True)
class OnlyWith:
    """Says that a setting is read only while another one of the same group has one of these values.

    >>> OnlyWith("optimizer", "sgd").said()
    'sgd'
    >>> OnlyWith("share", Limits(above=0)).said()
    'above 0'
    """

    setting: str
    values: tuple[Any, ...] | Limits

    def __init__(self, setting: str, *values: Any) -> None:
        object.__setattr__(self, "setting", setting)
        object.__setattr__(self, "values", values[0] if isinstance(values[0], Limits) else values)

    def said(self) -> str:
        """The values, as a message names them."""
        return str(self.values) if isinstance(self.values, Limits) else " or ".join(map(str, self.values))


@dataclass(frozen=True)
class Role:
    """What a setting is for, where that is more than the result of a run.

    Attributes:
        compared: whether runs that differ in it are different runs, and not the same one computed in another way.
        resumable: whether a run that is resumed may have another value of it.
        data: whether it says which data set is loaded.
    """

    compared: bool = True
    resumable: bool = False
    data: bool = False


@dataclass(frozen=True)
class Rare:
    """Says that a setting is seldom needed, so that only `--help all` shows it."""


class Flag(PrimitiveConstructorSpec):
    """How a setting is written, with the values that it may have.

    Attributes:
        items: of which each value is one (each of the items of a tuple): Limits, names, or None for any.
    """

    items: Container | Iterable | None

    def __init__(self, items: Container | Iterable | None, **how: Any) -> None:
        super().__init__(**how)
        object.__setattr__(self, "items", items)

    def check(self, flag: str, value: Any) -> None:
        """Raise FLError for a value that this setting cannot have."""
        for item in as_tuple(value):
            if self.items is None or item in self.items:
                continue
            if isinstance(self.items, Limits):
                raise FLError(f"--{flag} must be {self.items}, got {written(value)}")
            raise FLError(f"unknown --{flag} {item!r}: there are {', '.join(self.items)}")


def as_tuple(value: Any) -> tuple:
    """The items of a tuple, or the one value."""
    return value if isinstance(value, tuple) else (value,)


def written(value: Any) -> str:
    """A value as a flag takes it."""
    return ",".join(map(str, as_tuple(value)))


def _parsed(kind: Callable[[str], Any], word: str) -> Any:
    try:
        return kind(word)
    except ValueError:
        raise ValueError(f"{word!r} is not {'a whole number' if kind is int else 'a number'}") from None


def number(kind: type, metavar: str = "", **limits: Any) -> Flag:
    """A number within limits, see `Limits`."""
    within = Limits(**limits)
    return Flag(
        within,
        nargs=1,
        metavar=metavar or within.around(kind.__name__.upper()),
        instance_from_str=lambda strings: _parsed(kind, strings[0]),
        is_instance=lambda value: type(value) is kind or (kind is float and type(value) is int),
        str_from_instance=lambda value: [str(value)],
    )


def one_of(*names: str) -> Flag:
    """One of several names."""
    return Flag(
        names,
        nargs=1,
        metavar="{" + ",".join(names) + "}",
        instance_from_str=lambda strings: strings[0],
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=lambda value: [value],
    )


def several(kind: Callable[[str], Any], metavar: str, empty: str = "", items: Any = None, **limits: Any) -> Flag:
    """Several values, comma-separated.

    Args:
        empty: what stands for none of them.
        items: the names that there are; numbers have limits instead.
    """

    def from_strings(strings: list[str]) -> tuple:
        words = [word.strip() for word in strings[0].split(",")]
        if words in ([empty], [""]):
            return ()
        if "" in words:
            raise ValueError(
                f"{strings[0]!r} has an empty item: write one comma between two items, and none at the end"
            )
        return tuple(_parsed(kind, word) for word in words)

    return Flag(
        Limits(**limits) if limits else items,
        nargs=1,
        metavar=metavar,
        instance_from_str=from_strings,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value)) or empty],
    )


def count_or_share() -> Flag:
    """A whole number, or a share with a decimal point."""
    return Flag(
        None,
        nargs=1,
        metavar="INT|FLOAT",
        instance_from_str=lambda strings: _parsed(int if strings[0].lstrip("+-").isdigit() else float, strings[0]),
        is_instance=lambda value: type(value) in (int, float),
        str_from_instance=lambda value: [str(value)],
    )


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


def choice(what: str, values: Iterable[str], valid: Container | Iterable) -> None:
    """Raise FLError for the first value that is not valid."""
    for value in values:
        if value not in valid:
            raise FLError(f"unknown {what} {value!r}: there are {', '.join(valid)}")
