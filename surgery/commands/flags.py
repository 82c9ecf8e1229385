"""Arguments as written behind their flags, and functions of the user's own."""

import ast
import importlib
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg
from tyro.constructors import PrimitiveConstructorSpec

from surgery.errors import SurgeryError, explain, first_line


def make_list_reader(kind: type) -> Any:
    """Say how tyro reads numbers with commas between them."""

    def parse(texts: list[str]) -> tuple:
        try:
            return tuple(kind(text) for text in texts[0].split(","))
        except ValueError:
            noun = "whole numbers" if kind is int else "numbers"
            raise ValueError(f"{texts[0]!r} is no list of {noun}: write them with one comma between two") from None

    metavar = f"{kind.__name__.upper()},..."
    return PrimitiveConstructorSpec(1, metavar, parse, lambda value: True, lambda value: [str(value)])


def _share(texts: list[str]) -> float:
    try:
        return float(texts[0])
    except ValueError:
        raise ValueError(f"{texts[0]!r} is no share: give one number, above 0 and at most 1") from None


_SHARE = PrimitiveConstructorSpec(1, "SHARE", _share, lambda value: True, lambda value: [str(value)])
optional = partial(arg, help_behavior_hint="")  # "default: None" and "default: False" say nothing

File = Annotated[Path, arg(metavar="FILE")]
OptionalFile = Annotated[Path | None, optional(metavar="FILE")]
Files = Annotated[tuple[Path, ...], arg(metavar="FILE...", help_behavior_hint="(required)")]
Share = Annotated[float, _SHARE]
OptionalShare = Annotated[float | None, _SHARE, optional()]
Patterns = Annotated[tuple[str, ...], arg(metavar="PATTERN"), UseAppendAction]
Counts = Annotated[tuple[int, ...], make_list_reader(int)]
OptionalCounts = Annotated[tuple[int, ...] | None, make_list_reader(int), optional()]
WeightList = Annotated[tuple[float, ...] | None, make_list_reader(float), optional()]
FunctionPath = Annotated[str | None, optional(metavar="MODULE:FUNCTION")]
"""The name of a function of the user's own."""
ModelName = Annotated[str | None, optional(metavar="MODEL")]
Switch = Annotated[bool, FlagCreatePairsOff, optional()]
Heads = Literal["inside", "drop"]


def check_share(flag: str, value: float | None) -> None:
    """Raise a SurgeryError unless a number, if it is given, is above 0 and at most 1."""
    if value is not None and not 0 < value <= 1:
        raise SurgeryError(f"{flag} {value:g}: give a share, above 0 and at most 1", code="argument")


def generator(seed: int) -> torch.Generator:
    """Make a generator from a --seed."""
    if not 0 <= seed < 2**63:
        raise SurgeryError(f"--seed {seed}: give a whole number from 0 to 2^63 - 1", code="argument")
    return torch.Generator().manual_seed(seed)


def value_of(text: str) -> Any:
    """Read a number, true, false, none, a list of them, or else the text itself.

    >>> value_of("0.5"), value_of("true"), value_of("tensor"), value_of("[1, 2]")
    (0.5, True, 'tensor', [1, 2])
    """
    if text.lower() in ("true", "false", "none"):
        return {"true": True, "false": False, "none": None}[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text


def import_object(name: str, flag: str) -> Callable[..., Any]:
    """Import the user's `my_module:name`; errors become a SurgeryError that names it.

    Modules are looked for in the working directory, too.

    >>> import_object("math:sqrt", "--score")(4)
    2.0
    """
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        path = Path(module).with_suffix("")
        raise SurgeryError(f"{flag} {name}: write {'.'.join(path.parts)}:{attribute}, without .py", code="argument")
    if not module or not attribute:
        raise SurgeryError(f"{flag} {name}: give module:function, of a file module.py of your own", code="argument")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        holder = importlib.import_module(module)
        function = getattr(holder, attribute, None)
    except Exception as error:  # whatever the user's code raises
        raise SurgeryError(
            f"{flag} {name} cannot be loaded: {type(error).__name__}: {first_line(error)}", code="run"
        ) from error
    if not hasattr(holder, attribute):
        near = get_close_matches(attribute, vars(holder), n=1)
        way_out = f"did you mean {module}:{near[0]}?" if near else "give the name of a function in it"
        raise SurgeryError(f"{flag} {name}: {module} has no {attribute}: {way_out}", code="name")
    if not callable(function):
        raise SurgeryError(f"{flag} {name} is a {type(function).__name__}, and should be a function", code="argument")

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return function(*arguments, **named)
        except Exception as error:  # whatever the user's code raises
            raise SurgeryError(f"{flag} {name}: {type(error).__name__}: {first_line(error)}", code="run") from error

    return call


def batches_of(data: str) -> list[Any]:
    """List what a function of the user's own gives one after another."""
    batches = import_object(data, "--data")()
    if not isinstance(batches, Iterable):
        raise SurgeryError(f"--data {data} gives a {type(batches).__name__}, not several batches", code="argument")
    with explain(f"--data {data} fails"):
        return list(batches)
