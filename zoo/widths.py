"""From a full width and a rate to a number of channels. Both rules are monotone: a lower rate never gives more."""

import math
from typing import Literal, TypeAlias

Rounding: TypeAlias = Literal["ceil", "divisor8"]


def scaled(channels: int, rate: float, rounding: Rounding = "ceil") -> int:
    """The number of channels at a width rate.

    Args:
        channels: at full width.
        rounding: `ceil` is ceil(rate * channels), at least 1, as HeteroFL has it. `divisor8` takes the nearest multiple
            of 8, or the one above it if that is under 90% of rate * channels, and at least 8, as the released models of
            the mobile families do; full widths that are no multiples change as well.

    >>> [scaled(64, rate) for rate in (1.0, 0.5, 0.1)]
    [64, 32, 7]
    >>> [scaled(24, rate, "divisor8") for rate in (1.0, 0.75, 0.5, 0.1)]
    [24, 24, 16, 8]
    """
    exact = round(rate * channels, 6)  # 0.07 * 100 is 7, not 7.000000000000001
    if rounding == "ceil":
        return max(1, math.ceil(exact))
    nearest = max(8, int(exact + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * exact else nearest + 8
