"""The types that settings have: which there are, whether a value has one, and values of YAML as one."""

from collections.abc import Callable
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false", NoneType: "none"}


def options_of(kind: Any) -> tuple[Any, ...]:
    """The plain types that a type allows; of a tuple those of its items. () for one that settings cannot have.

    >>> options_of(Annotated[float | None, "a note"]), options_of(tuple[str, ...]), options_of("float")
    ((<class 'float'>, <class 'NoneType'>), (<class 'str'>,), ())
    """
    if get_origin(kind) is Annotated:
        return options_of(get_args(kind)[0])
    if get_origin(kind) is tuple:
        item, *rest = get_args(kind)
        return options_of(item) if rest == [...] and not is_tuple(item) else ()
    kinds = get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
    return kinds if all(isinstance(one, type) and one in _WORDS for one in kinds) else ()


def is_tuple(kind: Any) -> bool:
    """Whether values of a type are tuples."""
    return is_tuple(get_args(kind)[0]) if get_origin(kind) is Annotated else get_origin(kind) is tuple


def said(kind: Any) -> str:
    """A type in words.

    >>> said(float | None), said(tuple[int, ...])
    ('a number or none', 'a tuple, each item a whole number')
    """
    words = " or ".join(_WORDS[one] for one in options_of(kind))
    return f"a tuple, each item {words}" if is_tuple(kind) else words


def fits(kind: Any, value: Any) -> bool:
    """Whether a value has a type. NumPy's numbers count as numbers, whole ones as floats; truth values as neither.

    >>> fits(float, 1), fits(int, 1.0), fits(int, True), fits(tuple[str, ...], ["a"]), fits(bool | None, None)
    (True, False, False, False, True)
    """
    if is_tuple(kind):
        return isinstance(value, tuple) and all(_fits_one(options_of(kind), item) for item in value)
    return _fits_one(options_of(kind), value)


def _fits_one(kinds: tuple, value: Any) -> bool:
    tests: dict[type, Callable[[Any], bool]] = {
        int: lambda value: isinstance(value, Integral) and not isinstance(value, bool),
        float: lambda value: isinstance(value, Real) and not isinstance(value, bool),
    }
    return any(tests[kind](value) if kind in tests else isinstance(value, kind) for kind in kinds)


def from_yaml(kind: Any, value: Any) -> Any:
    """A value of YAML as the one that a type has: a list stands for a tuple, and so does a single value. TypeError for
    a value that the type does not have.

    >>> from_yaml(tuple[float, ...], [1, 0.5]), from_yaml(int | float, 3), from_yaml(float | None, 3)
    ((1.0, 0.5), 3, 3.0)
    """
    if is_tuple(kind):
        value = tuple(value) if isinstance(value, list) else (value,)
    if not fits(kind, value):
        raise TypeError
    kinds = options_of(kind)
    if float in kinds and int not in kinds:
        value = tuple(map(float, value)) if isinstance(value, tuple) else value if value is None else float(value)
    return value
