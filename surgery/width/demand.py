"""What the caller of `narrow` asks for."""

import difflib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from torch import nn

from surgery.errors import SurgeryError
from surgery.width.solved import (
    Atom,
)

Rounding: TypeAlias = Callable[[float], int]
Heads: TypeAlias = Literal["inside", "drop"]
Pick: TypeAlias = Callable[[Atom, int], Sequence[int]]
"""Which n positions of a width stay, ascending."""


def first(atom: Atom, n: int) -> Sequence[int]:
    """The first n positions."""
    return range(n)


@dataclass(frozen=True)
class Demand:
    """What the caller asks for.

    Attributes:
        rate: the share of every width that stays.
        rates: other shares for widths that modules of these names make; the first pattern that matches counts.
        keep: names of modules whose tensors stay whole.
        heads: whether attention shrinks inside of its heads, or loses heads.
        rounding: from a share to the number of positions that stay.
        pick: which ones stay.
        numbers: how many positions of each of some widths stay, if that is not their share.

    Patterns are names of modules, with `*`, `?` and `[...]` as in file names. What is inside of a module that matches
    matches, too.
    """

    rate: float
    rates: Mapping[str, float] = field(default_factory=dict)
    keep: Sequence[str] = ()
    heads: Heads = "inside"
    rounding: Rounding = math.ceil
    pick: Pick = first
    numbers: Callable[[Collection[Atom]], Mapping[Atom, int]] | None = None

    def share(self, size: int, rate: float) -> int:
        """How many of `size` positions stay at this rate, at least one."""
        share = round(rate * size, 9)
        asked = self.rounding(share)
        if isinstance(asked, bool) or not isinstance(asked, int | float) or not math.isfinite(asked):
            raise SurgeryError(f"rounding({share}) gives {asked!r}: give a function that returns a whole number")
        if asked < 1 <= share:
            raise SurgeryError(f"rounding({share}) gives {asked}, and a width keeps at least 1 position: round up")
        return max(1, min(size, int(asked)))

    def pattern_of(self, module: str) -> str | None:
        """The pattern of `rates` that counts for what a module makes."""
        return next((pattern for pattern in self.rates if matches(module, pattern)), None)

    def asked_of(self, module: str) -> float | None:
        """The share that `rates` gives for what a module makes."""
        return self.rates.get(self.pattern_of(module))

    def rate_of(self, atom: Atom) -> float:
        """The share of a width; SurgeryError if modules that make it together are to have different shares."""
        asked = {maker: rate for maker in atom.makers if (rate := self.asked_of(maker)) is not None}
        if len(set(asked.values())) > 1:
            a = next(iter(asked))
            b = next(maker for maker in asked if asked[maker] != asked[a])
            raise SurgeryError(
                f"rates asks for {asked[a]} of {a!r} and {asked[b]} of {b!r}, but both make one width of {atom.size} "
                "positions (they are added, say): give them the same rate"
            )
        return next(iter(asked.values()), self.rate)


def matches(module: str, pattern: str) -> bool:
    """Whether a pattern matches the name of a module or of one around it.

    >>> matches("layer1.0.conv1", "layer1"), matches("layer1.0.conv1", "*.conv1"), matches("layer10", "layer1")
    (True, True, False)
    """
    parts = module.split(".")
    return any(fnmatchcase(".".join(parts[:n]), pattern) for n in range(1, len(parts) + 1))


def checked(model: nn.Module, demand: Demand) -> Demand:
    """The demand; SurgeryError if a rate is no share, or a pattern matches no module of the model."""
    if not isinstance(model, nn.Module):
        raise SurgeryError(f"narrow runs the model: give a module, not a {type(model).__name__}")
    for rate in (demand.rate, *_rates(demand.rates)):
        if isinstance(rate, Mapping):
            raise SurgeryError(f"rate is one number, got {rate}: give rates by the names of modules as rates={{...}}")
        if isinstance(rate, bool | str) or not isinstance(rate, int | float) or not 0 < rate <= 1:
            raise SurgeryError(f"rate is a share of the width in (0, 1], got {rate}")
    if demand.heads not in ("inside", "drop"):
        raise SurgeryError(f"unknown heads={demand.heads!r}: choose inside or drop")
    if not callable(demand.rounding):
        raise SurgeryError(f"rounding is a function such as math.ceil, got {demand.rounding!r}")
    if isinstance(demand.keep, str) or not all(isinstance(pattern, str) for pattern in demand.keep):
        raise SurgeryError(f"keep is a list of names of modules, got {demand.keep!r}")
    if odd := [pattern for pattern in demand.rates if not isinstance(pattern, str)]:
        raise SurgeryError(f"rates gives a rate for each name of modules, got {odd[0]!r} as a name")
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for pattern in (*demand.keep, *demand.rates):
        if not any(matches(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "see model.named_modules()"
            raise SurgeryError(f"no module of {type(model).__name__} matches {pattern!r}: {hint}")
    return demand


def _rates(rates: Any) -> Iterator[Any]:
    if not isinstance(rates, Mapping):
        raise SurgeryError(f"rates gives a rate for each pattern, {{'layer1': 0.5}}, got {rates!r}")
    yield from rates.values()
