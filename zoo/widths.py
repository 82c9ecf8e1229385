"""From a full width and a rate to a number of channels. Both rules are monotone: a lower rate never gives more."""

import math
from typing import Literal, TypeAlias

Rounding: TypeAlias = Literal["ceil", "divisor8"]


def scaled(channels: int, rate: float, rounding: Rounding = "ceil") -> int:
    """The number of channels at a width rate.

    Args:
        channels: at full width.
        rounding: `ceil` is ceil(rate * channels), at least 1, as in HeteroFL. `divisor8` is the function below; full
            widths that are no multiples of 8 change as well.

    >>> [scaled(64, rate) for rate in (1.0, 0.5, 0.1)]
    [64, 32, 7]
    >>> [scaled(24, rate, "divisor8") for rate in (1.0, 0.75, 0.5, 0.1)]
    [24, 24, 16, 8]
    """
    exact = round(rate * channels, 6)  # 0.07 * 100 is 7, not 7.000000000000001
    return max(1, math.ceil(exact)) if rounding == "ceil" else divisor8(exact)


def divisor8(channels: float) -> int:
    """The nearest multiple of 8, or the next one if that is below 90% of the number; at least 8.

    The released models of the mobile families round in this way. `surgery.narrow(..., rounding=zoo.divisor8)` takes it.

    >>> [divisor8(channels) for channels in (1, 12, 18, 24.0)]
    [8, 16, 24, 24]
    """
    nearest = max(8, int(channels + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * channels else nearest + 8
