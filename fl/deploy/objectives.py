"""What clients minimise, told to other machines by the name of the function that makes it, and its arguments.

A function goes by its module and name. One that another function has made, as `proximal(0.1)`, goes by the name of
that function and by what it closes over, which have to be its arguments: numbers, texts, or such functions again. A
node takes only functions of this project, and those of packages that add methods to it, that it has already imported.
"""

import inspect
import sys
from collections.abc import Callable
from typing import Any

from fl.algorithms import ALGORITHMS
from fl.base.errors import FLError

_OWN = ("fl.engine.objectives", "fl.algorithms.")


def told(function: Callable | None) -> Any:
    """A function as plain data.

    Raises:
        FLError: for one that cannot be made again from its name and plain arguments.

    >>> from fl.engine.objectives import proximal
    >>> told(proximal(0.1))["given"]
    {'mu': 0.1, 'objective': {'name': 'fl.engine.objectives:cross_entropy'}}
    """
    if function is None:
        return None
    if not inspect.isfunction(function):
        raise _untellable(function)
    maker, inside, _ = function.__qualname__.partition(".<locals>.")
    said = {"name": f"{function.__module__}:{maker}"}
    if inside:
        names = function.__code__.co_freevars
        values = [cell.cell_contents for cell in function.__closure__ or ()]
        said["given"] = {name: told(value) if callable(value) else value for name, value in zip(names, values)}
        plain = all(callable(value) or isinstance(value, int | float | str | None) for value in values)
    try:
        again = heard(said)
    except FLError:
        raise _untellable(function) from None
    if again.__code__ is not function.__code__ or (inside and not plain):
        raise _untellable(function)
    return said


def heard(said: Any) -> Callable | None:
    """The inverse of `told`.

    Raises:
        FLError: for what is not told like this, and functions of other modules.

    >>> heard({"name": "os:system"})
    Traceback (most recent call last):
    fl.base.errors.FLError: clients cannot minimise 'os:system': it is not of this project or of one of its methods
    """
    if said is None:
        return None
    if not isinstance(said, dict) or not isinstance(said.get("name"), str) or said.keys() - {"name", "given"}:
        raise FLError("what clients minimise is told by a name and what is given")
    module, _, name = said["name"].partition(":")
    methods = {getattr(method, "make", method).__module__ for method in ALGORITHMS.values()}
    found = None
    if module in methods or module.startswith(_OWN):
        found = inspect.unwrap(getattr(sys.modules.get(module), name, None) or (lambda: None))
    if not inspect.isfunction(found) or found.__qualname__ != name or found.__module__ != module:
        raise FLError(f"clients cannot minimise {said['name']!r}: it is not of this project or of one of its methods")
    if "given" not in said:
        return found
    given = said["given"]
    made = [one for one in found.__code__.co_consts if inspect.iscode(one)]  # the functions that it may return
    if not isinstance(given, dict) or not any(set(one.co_freevars) == set(given) for one in made):
        raise FLError(f"clients cannot minimise {said['name']!r}: that function makes none from what is given")
    return found(**{key: heard(value) if isinstance(value, dict) else value for key, value in given.items()})


def _untellable(function: Any) -> FLError:
    return FLError(
        f"what clients minimise, {getattr(function, '__qualname__', function)!r}, cannot be told to other machines: "
        "write it as a function of a method's file, or as one that such a function makes from numbers, texts and other "
        "such functions, its only arguments"
    )
