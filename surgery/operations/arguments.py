"""Kinds of arguments of operations: how one is written behind its flag, and what it may be."""

import ast
import importlib
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from tyro.constructors import PrimitiveConstructorSpec

from surgery.errors import SurgeryError, first_line
from surgery.merging.driver import number, switch


def value_of(text: str) -> Any:
    """A number, true, false, a list of them, or else the text itself.

    >>> value_of("0.5"), value_of("true"), value_of("tensor"), value_of("[1, 2]")
    (0.5, True, 'tensor', [1, 2])
    """
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def shown(value: Any) -> str:
    """A value as messages show it, cut to one line.

    >>> shown(True), shown([1, "a"]), shown({"a": None})
    ('true', "[1, 'a']", '{a: null}')
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        text = f"[{', '.join(map(shown, value))}]"
    elif isinstance(value, Mapping):
        text = "{" + ", ".join(f"{key}: {shown(one)}" for key, one in value.items()) + "}"
    else:
        text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


Check: TypeAlias = Callable[[str, Any], Any]
"""A function of an argument's name and value, which gives the value or raises a SurgeryError."""


def needs(what: str, fits: Callable[[Any], bool], also: Check = lambda name, value: value) -> Check:
    """The check that a value fits, whose error says what to give, and then another one.

    >>> needs("an even number", lambda value: value % 2 == 0)("size", 4)
    4
    """

    def check(name: str, value: Any) -> Any:
        if not fits(value):
            raise SurgeryError(f"{name}={shown(value)}: {what}")
        return also(name, value)

    return check


def _texts(name: str, value: Any) -> tuple[str, ...]:
    """A list of texts, or a single one."""
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise SurgeryError(f"{name}={shown(value)}: give a list of texts, such as [layer1]")
    return tuple(found)


def listed(kind: type, example: str) -> Any:
    """How tyro reads a comma-separated list of numbers."""

    def parse(strings: list[str]) -> tuple:
        items = [item.strip() for item in strings[0].split(",")]
        if "" in items:
            hint = "write one comma between two items, and none at the end"
            raise ValueError(f"{strings[0]!r} has an empty item: {hint}")
        try:
            return tuple(map(kind, items))
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise ValueError(f"{strings[0]!r} is not a list of {what}, such as {example}") from None

    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{kind.__name__.upper()},...",
        instance_from_str=parse,
        is_instance=lambda value: value is None or isinstance(value, tuple),
        str_from_instance=lambda value: [str(value) if value is None else ",".join(map(str, value))],
    )


@dataclass(frozen=True)
class Kind:
    """What an annotation says of an argument beside its type.

    Attributes:
        metavar: what --help calls the value; None for tyro's own word.
        check: of the argument's name and value.
        by: how tyro reads the text behind the flag, where the type does not say.
        repeated: whether the flag may be given several times.
        positional: whether the command line takes it without a flag.
    """

    metavar: str | None = None
    check: Check = lambda name, value: value
    by: PrimitiveConstructorSpec | None = None
    repeated: bool = False
    positional: bool = False


_whole = needs("give a whole number, 0 or more", lambda v: type(v) is int and 0 <= v < 2**63)
_steps = needs("give a whole number from 1 to 1000", lambda v: type(v) is int and 1 <= v <= 1000)
_counts = needs(
    "give a number of blocks for each section, such as [2, 2]",
    lambda v: isinstance(v, list | tuple | dict),
    lambda name, value: list(value) if isinstance(value, tuple) else value,
)

Number = Annotated[float, Kind("NUMBER", number)]
Share = Annotated[float, Kind("SHARE", partial(number, low=0, high=1, open_low=True))]
Whole = Annotated[int, Kind("INT", _whole)]
Steps = Annotated[int, Kind("INT", _steps)]
Patterns = Annotated[tuple[str, ...], Kind("PATTERN", _texts, repeated=True)]
Counts = Annotated[tuple[int, ...], Kind("INT,...", _counts, listed(int, "2,2,4,2"))]
"""A number of blocks for each section."""
Shape = Annotated[tuple[int, ...], Kind("INT,...", by=listed(int, "3,224,224"))]
Floats = Annotated[tuple[float, ...], Kind("FLOAT,...", by=listed(float, "1,0.5"))]
Function = Annotated[str, Kind("MODULE:FUNCTION")]
"""A function of the user's own."""
PlanFile = Annotated[Path, Kind("PLAN.json")]
OrdersFile = Annotated[Path, Kind("FILE.json")]
Score = Literal["l1", "l2", "bn_scale"]
"""How important a position is: by the norm of its weights, or by batch norms' scales."""


def type_and_kind(annotation: Any) -> tuple[Any, Kind]:
    """The type of an argument, without None, and what is known of it beside.

    >>> type_and_kind(Share | None)[0], type_and_kind(Share | None)[1].metavar
    (<class 'float'>, 'SHARE')
    """
    several = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else ()
    if len(several) == 2 and type(None) in several:
        (annotation,) = (one for one in several if one is not type(None))
    if get_origin(annotation) is Annotated:
        found, *beside = get_args(annotation)
        return found, next((one for one in beside if isinstance(one, Kind)), Kind())
    if get_origin(annotation) is Literal:
        *others, last = get_args(annotation)
        return annotation, Kind(check=needs(f"choose {', '.join(others)} or {last}", (*others, last).__contains__))
    return annotation, Kind(check=switch) if annotation is bool else Kind()


def own(name: str, what: str) -> Any:
    """What a module of the user's calls so, `my_module:name`; modules in the working directory are found, too.

    Raises:
        SurgeryError: if there is no such thing; `what` names the argument.

    >>> own("math:sqrt", "--score")(4)
    2.0
    """
    module, _, attribute = str(name).partition(":")
    if not module or not attribute:
        raise SurgeryError(f"{what} {name}: give module:function, a function in a file module.py of your own")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the user's code raises
        raise SurgeryError(f"{what} {name} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error


def function_of(name: str, what: str) -> Callable[..., Any]:
    """A function of the user's own, whose errors become a SurgeryError that names it."""
    found = own(name, what)
    if not callable(found):
        raise SurgeryError(f"{what} {name} is a {type(found).__name__}, and should be a function")

    def call(*arguments: Any) -> Any:
        try:
            return found(*arguments)
        except Exception as error:  # whatever the user's code raises
            raise SurgeryError(f"{what} {name} fails: {type(error).__name__}: {first_line(error)}") from error

    return call


def batches_of(data: str) -> list[Any]:
    """What a function of the user's own gives one after another."""
    found = function_of(data, "data")()
    if not isinstance(found, Iterable):
        raise SurgeryError(f"data {data} gives a {type(found).__name__}, and should give batches one after another")
    return list(found)
