"""Columns of metrics.csv: all that is known of one, in one place."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from fl.base.errors import FLError

Due = Literal["global", "models", "round"]


@dataclass(frozen=True)
class Column:
    """A column of metrics.csv, and how summaries, tables and figures show it.

    Attributes:
        kind: what its numbers are, int or float.
        due: when it is measured: after every "round", where the "global" model is evaluated (--eval-every), or where
            the participants' "models" are (--eval-client-models-every).
        heading: above its numbers in the tables of runs; empty: not shown there.
        beside_clients: for scores of the global model, the heading where scores on clients' own data stand beside them.
        factor, digits: a number is shown times this factor, with this number of digits after the point (none for
            int). A factor of 100 is for shares, which are shown in percent.
        label: of the axis of its curves; empty: no curves are drawn.
        log: whether that axis is logarithmic.
        span: the least that this axis spans, so that noise does not fill it; of a logarithmic one the least ratio of
            its ends, minus 1.
        falls: whether less is better.
        limits: between which values the numbers lie, so that bands end there; shares lie between 0 and 1.

    >>> Column(factor=100).text(0.98765), Column(digits=3).text(0.98765)
    ('98.77%', '0.988')
    """

    kind: type = float
    due: Due = "round"
    heading: str = ""
    beside_clients: str = ""
    factor: float = 1
    digits: int = 2
    label: str = ""
    log: bool = False
    span: float = 0.02
    falls: bool = False
    limits: tuple[float, float] = (-math.inf, math.inf)

    def __post_init__(self) -> None:
        if self.kind not in (int, float):
            raise FLError(f"not a column: its numbers must be int or float, got {self.kind!r}")
        if self.due not in get_args(Due):
            raise FLError(f"not a column: it is due with one of {', '.join(get_args(Due))}, got {self.due!r}")

    @property
    def ends(self) -> tuple[float, float]:
        """Return the least and the largest value that numbers of this column can have."""
        return (0.0, 1.0) if self.factor == 100 else self.limits

    def number(self, value: float) -> str:
        """Format a number as tables show it, without a percent sign."""
        return f"{self.factor * value:.{0 if self.kind is int else self.digits}f}"

    def text(self, value: float) -> str:
        """Format a number as sentences show it: shares with a percent sign."""
        return self.number(value) + ("%" if self.factor == 100 else "")
