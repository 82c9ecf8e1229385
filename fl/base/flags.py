"""Kinds of flags: several values, comma-separated."""

from collections.abc import Callable
from typing import Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

from fl.base.errors import FLError


def comma_separated(parse: Callable[[str], Any], metavar: str, empty: str = "") -> PrimitiveConstructorSpec:
    """A flag of several values; `empty` is what stands for none."""

    def from_strings(strings: list[str]) -> tuple:
        items = [item.strip() for item in strings[0].split(",") if item.strip()]
        return () if items == [empty] else tuple(map(parse, items))

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=from_strings,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [",".join(map(str, value)) or empty],
    )


Names = Annotated[tuple[str, ...], comma_separated(str, "NAME,...")]
Integers = Annotated[tuple[int, ...], comma_separated(int, "INT,...")]
Depths = Annotated[tuple[int, ...], comma_separated(int, "INT,...", empty="all")]
Blocks = Annotated[tuple[str, ...], comma_separated(str, "INT[-INT...],...", empty="own")]
Rates = Annotated[tuple[float, ...], comma_separated(float, "FLOAT,...")]
Lengths = Annotated[tuple[int, ...], comma_separated(int, "INT,...", empty="converged")]
Sizes = Annotated[tuple[int, ...], comma_separated(int, "INT,...", empty="auto")]


def choice(what: str, values, valid) -> None:
    """Raise FLError for the first value that is not valid."""
    for value in values:
        if value not in valid:
            raise FLError(f"unknown {what} {value!r}: there are {', '.join(valid)}")
