"""Calls that the previous version took: they still work for one version, with a warning that says what to write."""

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_END = "the old call will be refused from the next version on"


def formerly(positional: str, **renamed: str) -> Callable[[F], F]:
    """Accept the calls that a function took in the previous version.

    Args:
        positional: all parameters that could be given by position, in their old order, under their present names.
        renamed: the present name of a parameter by its former one.

    >>> @formerly("model rate", share="rate")
    ... def cut(model, *, rate): return model * rate
    >>> with warnings.catch_warnings(record=True, action="always") as caught:
    ...     cut(8, 0.5), cut(8, share=0.25)
    (4.0, 2.0)
    >>> for warning in caught: print(warning.message)
    surgery.cut takes rate by keyword: write rate=...; the old call will be refused from the next version on
    surgery.cut has rate instead of share now: write rate=...; the old call will be refused from the next version on
    >>> inspect.signature(cut)
    <Signature (model, *, rate)>
    """
    order = positional.split()

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters.values()
        allowed = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
        name = function.__qualname__

        @functools.wraps(function)
        def accepting(*args: Any, **kwargs: Any) -> Any:
            given = list(kwargs.items())
            if allowed < len(args) <= len(order):
                moved = dict(zip(order[allowed:], args[allowed:]))
                new = ", ".join(f"{key}=..." for key in moved)
                _warn(f"{name} takes {', '.join(moved)} by keyword: write {new}")
                given += moved.items()
                args = args[:allowed]
            for old in renamed.keys() & kwargs.keys():
                _warn(f"{name} has {renamed[old]} instead of {old} now: write {renamed[old]}=...")
            kwargs = {}
            for key, value in given:
                key = renamed.get(key, key)
                if key in kwargs:
                    raise TypeError(f"{name}() got multiple values for argument {key!r}")
                kwargs[key] = value
            return function(*args, **kwargs)

        return cast(F, accepting)

    return decorate


def former_name(old: str, function: F) -> F:
    """A function under the name that it had in the previous version."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        _warn(f"{old} is called surgery.{function.__name__} now")
        return function(*args, **kwargs)

    return cast(F, called)


def warn_of(old: str, new: str) -> None:
    """Warn of an old call, for a function that `formerly` decorates: its caller should use the new call."""
    warnings.warn(f"surgery.{old} is surgery.{new} now; {_END}", DeprecationWarning, stacklevel=4)


def _warn(text: str) -> None:
    warnings.warn(f"surgery.{text}; {_END}", DeprecationWarning, stacklevel=3)
