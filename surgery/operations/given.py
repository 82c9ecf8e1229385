"""What people write into recipes and behind flags, checked before it is used."""

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from surgery.errors import SurgeryError, first_line
from surgery.operations.texts import shown
from surgery.plan import Submodel


def number(name: str, value: Any) -> float:
    """A finite number; SurgeryError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SurgeryError(f"{name}={shown(value)}: give a number")
    return value


def share(name: str, value: Any) -> float:
    """A number above 0 and at most 1.

    >>> share("rate", 0.5)
    0.5
    """
    if not 0 < number(name, value) <= 1:
        raise SurgeryError(f"{name}={value:g}: give a share above 0 and at most 1")
    return value


def whole(name: str, value: Any) -> int:
    """A whole number that is not negative."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise SurgeryError(f"{name}={shown(value)}: give a whole number, 0 or more")
    return value


def choice(name: str, value: Any, known: Sequence[str]) -> str:
    """One of some texts."""
    if value not in known:
        raise SurgeryError(f"{name}={shown(value)}: choose {', '.join(known[:-1])} or {known[-1]}")
    return value


def texts(name: str, value: Any) -> tuple[str, ...]:
    """A list of texts, or a single one.

    >>> texts("keep", "layer1"), texts("keep", ["a", "b"])
    (('layer1',), ('a', 'b'))
    """
    found = (value,) if isinstance(value, str) else value
    if not isinstance(found, list | tuple) or not all(isinstance(one, str) for one in found):
        raise SurgeryError(f"{name}={shown(value)}: give a list of texts, such as [layer1]")
    return tuple(found)


def plan_of(path: str | Path) -> Submodel:
    """The plan of a file; SurgeryError that names the file if it holds none."""
    try:
        return Submodel.load(path)
    except OSError as error:
        raise SurgeryError(f"{path} cannot be read: {error.strerror or error}") from None
    except SurgeryError as error:
        raise SurgeryError(f"{path}: {error}") from None


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
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # whatever the user's code raises
        raise SurgeryError(f"{what} {name} cannot be loaded: {type(error).__name__}: {first_line(error)}") from error
    return found


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
