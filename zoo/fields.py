"""Checks of a spec's fields. Their errors name the field and the valid values."""

import numbers
from typing import Any, get_args

from zoo.errors import ZooError
from zoo.member import Member
from zoo.norms import Norm
from zoo.widths import Rounding

_COUNTS = ("num_classes", "in_channels", "image_size", "tokens", "heads")
_CHOICES = {"norm": get_args(Norm), "rounding": get_args(Rounding), "stem": ("imagenet", "cifar")}
_WIDEST, _DEEPEST = 100, 500  # 500 blocks in each section are more than any published network has
_MOST = {"num_classes": 2**31, "in_channels": 2**20, "image_size": 2**16, "tokens": 2**24, "heads": 2**16}
_SWITCHES = ("scaler", "step_size")


def checked_field(name: str, field: str, value: Any, member: Member) -> Any:
    """The value of a field other than width and depth: the given one if it is valid, or for None the default."""
    if value is None:
        return member.defaults.get(field)
    if field not in member.defaults:
        raise ZooError(f"{name} takes no {field}; it takes width, depth, {', '.join(member.defaults)}")
    if field in _COUNTS:
        if not _is_count(value):
            raise ZooError(f"{name}: {field} must be a whole number, 1 or more, got {value!r}")
        if value > _MOST[field]:
            raise ZooError(f"{name}: {field} must be at most {_MOST[field]:,}, got {value:,}")
        return int(value)
    if field in _CHOICES:
        if value not in _CHOICES[field]:
            raise ZooError(f"{name}: unknown {field} {value!r}: choose {', '.join(_CHOICES[field])}")
        return value
    if field in _SWITCHES:
        if not isinstance(value, bool):
            raise ZooError(f"{name}: {field} is true or false, got {value!r}")
        return value
    if field == "layer_scale" and _is_number(value) and value == 1:
        return 1.0
    if not _is_number(value) or not 0 <= value < 1 or (field == "norm_eps" and value == 0):
        raise ZooError(f"{name}: {field} must be a number of at least 0 and below 1, got {value!r}")
    return float(value)


def rates(name: str, width: Any, member: Member) -> tuple[float, ...]:
    """A rate for each rated part. If only the sections have one, that of the last is used for the other parts, too."""
    slots, sections = len(member.rated_parts), len(member.depth or ())
    result = tuple(width) if isinstance(width, tuple | list) else (width,) * slots
    if len(result) == sections:
        result += result[-1:] * (slots - sections)
    if len(result) != slots:
        each = f", or one for each of {', '.join(member.rated_parts)}" if slots > 1 else ""
        raise ZooError(f"{name} takes one width{each}; got {len(result)}")
    for rate in result:
        if not _is_number(rate) or not 0 < rate <= _WIDEST:
            raise ZooError(f"{name}: width is a rate above 0 and at most {_WIDEST} (1 is the full width), got {rate!r}")
        if member.depth is None and rate > 1:
            raise ZooError(f"{name} can only be made narrower, by a width of at most 1, got {rate:g}")
    return tuple(map(float, result))


def blocks(name: str, depth: Any, member: Member) -> tuple[int, ...] | None:
    """The number of blocks of each section; None is the full depth of a library's model, whose sections are unknown."""
    if depth is None:
        return member.depth
    several = isinstance(depth, tuple | list)
    if member.depth is None:
        result = (tuple(depth) or (0,)) if several else (depth,)
    elif member.depth == () != depth:
        raise ZooError(f"{name} has no sections of blocks, so no depth can be chosen")
    else:
        result = tuple(depth) if several else (depth,) * len(member.depth)
        if len(result) != len(member.depth):
            each = f"one for each of its {len(member.depth)} sections"
            raise ZooError(f"{name} takes one depth, or {each}; got {len(result)}")
    if wrong := [count for count in result if not _is_count(count)]:
        raise ZooError(f"{name}: a section has a whole number of blocks, 1 or more; got {wrong[0]!r}")
    if max(result, default=0) > _DEEPEST:
        raise ZooError(f"{name}: a section has at most {_DEEPEST} blocks; got {max(result):,}")
    return tuple(map(int, result))


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
