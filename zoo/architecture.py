"""Named architectures with their arguments, and checks of networks' arguments."""

import inspect
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args

from torch import nn

from zoo.errors import ZooError
from zoo.norms import Norm

Rounding: TypeAlias = Literal["ceil", "divisor8"]
Stem: TypeAlias = Literal["imagenet", "cifar"]

_COUNTS = {"num_classes": 2**31, "in_channels": 2**20, "image_size": 2**16, "tokens": 2**24, "heads": 2**16}
"""Fields that are whole numbers, and the most that they may be."""
_CHOICES = {"rounding": get_args(Rounding), "stem": get_args(Stem), "norm": get_args(Norm)}
_SHARES = ("norm_eps", "dropout", "drop_path")
_SWITCHES = ("scaler", "step_size", "exits")
_FIELDS = (*_COUNTS, *_CHOICES, *_SHARES, *_SWITCHES)
_WIDEST, _DEEPEST, _MOST = 100, 500, 2**20  # 500 blocks in each section are more than any published network has


@dataclass(frozen=True)
class Architecture:
    """A named architecture: one row of a table PRESETS.

    Attributes:
        network: the class that builds it; None where a subclass of `Spec` does, for models from elsewhere.
        arguments: what the class is given besides its own defaults. `depths` are the blocks of each section at full
            depth; None where they are not known, as of models from elsewhere. These have one width rate, of at most 1.
            A function is given the size of the images. What the class does not take describes its inputs.
        source: where it is described.
        torchvision, timm: the library's name of the same architecture, where it has that.
        torchvision_plain: torchvision's name of the same architecture for `norm="none"`.

    >>> from zoo import CNN
    >>> row = Architecture(CNN, {"num_classes": 62}, "LEAF")
    >>> row.defaults["num_classes"], row.defaults["image_size"], row.depth, row.rate_names
    (62, 28, (), ('conv1', 'conv2', 'fc1'))
    """

    network: Any
    arguments: Mapping[str, Any]
    source: str
    torchvision: str = ""
    torchvision_plain: str = ""
    timm: str = ""

    @property
    def depth(self) -> tuple[int, ...] | None:
        """The blocks of each section at full depth: () without sections, None if unknown."""
        return self.arguments.get("depths", ())

    @cached_property
    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        return inspect.signature(self.network).parameters if self.network else {}

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The fields of `Spec` taken besides width and depth, with their defaults."""
        values = {name: parameter.default for name, parameter in self._parameters.items()} | dict(self.arguments)
        return {field: values[field] for field in _FIELDS if field in values}

    @property
    def rate_names(self) -> tuple[str, ...]:
        """The parts with a width rate of their own: sections, then `extra_rates`."""
        return ("all",) if self.depth is None else self.network.rate_names(len(self.depth))

    def build(self, **fields: Any) -> nn.Module:
        """Call the class with this row's arguments and the fields that it takes."""
        values = {**self.arguments, **fields}
        return self.network(**{name: values[name] for name in self._parameters if name in values})


def check(owner: str, field: str, value: Any) -> Any:
    """Return a field but width and depth as a plain number; ZooError if out of range.

    >>> check("ResNet", "norm", "instance")
    Traceback (most recent call last):
    zoo.errors.ZooError: ResNet: unknown norm 'instance': choose none, batch, static_batch, group, layer
    """
    if field in _CHOICES:
        if value not in _CHOICES[field]:
            raise ZooError(f"{owner}: unknown {field} {value!r}: choose {', '.join(_CHOICES[field])}", code="argument")
        return value
    if field in _SWITCHES:
        if not isinstance(value, bool):
            raise ZooError(f"{owner}: {field} is true or false, got {value!r}", code="argument")
        return value
    if field in _SHARES:
        if not _is_number(value) or not 0 <= value < 1 or (field == "norm_eps" and value == 0):
            raise ZooError(f"{owner}: {field} must be a number from 0 to below 1, got {value!r}", code="argument")
        return float(value)
    if not _is_count(value):
        raise ZooError(f"{owner}: {field} must be a whole number, 1 or more, got {value!r}", code="argument")
    if value > _COUNTS.get(field, _MOST):
        raise ZooError(
            f"{owner}: {field} must be at most {_COUNTS.get(field, _MOST):,}, got {value:,}", code="argument"
        )
    return int(value)


def check_rates(owner: str, width: Any, parts: Sequence[str], sections: int) -> tuple[float, ...]:
    """Return the width rate of each part; one rate is for all.

    The last section's rate is also the rate of parts after it.

    >>> check_rates("MobileNetV2", (0.5, 1), ["section1", "section2", "tail"], sections=2)
    (0.5, 1.0, 1.0)
    """
    rates = tuple(width) if isinstance(width, tuple | list) else (width,) * len(parts)
    if len(rates) == sections:
        rates += rates[-1:] * (len(parts) - sections)
    if len(rates) != len(parts):
        hint = f", or one for each of {', '.join(parts)}" if len(parts) > 1 else ""
        raise ZooError(f"{owner} takes one width{hint}; got {len(rates)}", code="argument")
    for rate in rates:
        if not _is_number(rate) or not 0 < rate <= _WIDEST:
            raise ZooError(f"{owner}: width is a rate above 0, at most {_WIDEST}, got {rate!r}", code="argument")
    return tuple(map(float, rates))


def check_depths(owner: str, depths: Any, sections: int | None, exits: bool | None = None) -> tuple[int, ...]:
    """Return the number of blocks of each section: one number is for all.

    Args:
        sections: how many there are; None if that is not known.
        exits: whether each section has a classifier, so that the last sections may be missing; None if it cannot have.

    >>> check_depths("ResNet", 2, 3), check_depths("ResNet", [2, 1, 0], 3, exits=True)
    ((2, 2, 2), (2, 1, 0))
    """
    several = isinstance(depths, tuple | list)
    result = tuple(depths) if several else (depths,) * (1 if sections is None else sections)
    if sections is not None and len(result) != sections:
        raise ZooError(
            f"{owner} takes one depth, or one for each of {sections} sections; got {len(result)}", code="argument"
        )
    present = result or (0,)
    while exits and len(present) > 1 and present[-1] == 0 and not isinstance(present[-1], bool):
        present = present[:-1]
    if wrong := [count for count in present if not _is_count(count)]:
        but = " (the last sections of a model with exits may have 0)" if several and exits is not None else ""
        raise ZooError(f"{owner}: a section has 1 or more blocks{but}; got {wrong[0]!r}", code="argument")
    if max(result) > _DEEPEST:
        raise ZooError(f"{owner}: a section has at most {_DEEPEST} blocks; got {max(result):,}", code="argument")
    return tuple(map(int, result))


def _is_count(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
