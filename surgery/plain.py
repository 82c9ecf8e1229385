"""Attributes of modules that hold plain values, or objects with plain attributes."""

from typing import Any

from torch import Tensor, nn


def is_settings(value: Any) -> bool:
    """Return whether a value is an object with plain attributes to set."""
    frozen = getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False)
    plain = hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type) and not callable(value)
    return plain and not frozen


def is_plain(value: Any, keys: Any = str) -> bool:
    """Return whether an edit may carry a value: plain values, lists and dicts of them.

    Args:
        keys: the types of keys that dicts may have.

    >>> is_plain((8, 0.5, None)), is_plain(len)
    (True, False)
    """
    if value is None or isinstance(value, (int, float, str)):
        return True
    if isinstance(value, (list, tuple)):
        return _ATOMS.issuperset(map(type, value)) or all(is_plain(item, keys) for item in value)
    return isinstance(value, dict) and all(isinstance(k, keys) and is_plain(item, keys) for k, item in value.items())


_ATOMS = {type(None), bool, int, float, str}


def is_like(old: Any, value: Any) -> bool:
    """Return whether one plain value may take the place of another.

    A number may replace a number, and a list of such items a list. A number or a list of numbers may replace None,
    and None may replace them.

    >>> is_like(8, 0.5), is_like((2, 2), [1]), is_like(None, 4), is_like(8, "8"), is_like(8, True)
    (True, True, True, False, False)
    """
    if isinstance(old, list | tuple) and isinstance(value, list | tuple):
        return all(any(is_like(example, item) for example in old or [0]) for item in value)
    if isinstance(old, dict) and isinstance(value, dict):
        return all(key not in old or is_like(old[key], item) for key, item in value.items())
    if old is None or value is None:
        other = value if old is None else old
        return other is None or is_like(0, other) or is_like([0], other)
    if isinstance(old, bool) is not isinstance(value, bool):
        return False
    return any(isinstance(old, kind) and isinstance(value, kind) for kind in (str, int | float))
