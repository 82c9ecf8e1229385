"""How the clients' learning rate changes from round to round."""

import math
from collections.abc import Callable
from typing import TypeAlias

from fl.base.errors import FLError

Schedule: TypeAlias = Callable[[int], float]
"""round (from 1) -> the factor of its learning rate"""

SCHEDULES = ("constant", "step", "cosine")


def schedule(name: str, rounds: int, factor: float = 0.1, at: tuple[float, ...] = (0.5, 0.75)) -> Schedule:
    """A schedule by name.

    Args:
        name: `constant`; `step` multiplies by `factor` after each of the shares `at` of all rounds (HeteroFL, NeFL,
            FedFA: 0.1 after half and three quarters); `cosine` falls from 1 in the first round to nearly 0.
        rounds: the number of rounds of the whole run.

    Raises:
        FLError: for an unknown name, and shares outside of (0, 1).

    >>> [round(schedule("step", 8)(r), 3) for r in (1, 4, 5, 6, 7, 8)]
    [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    >>> [round(schedule("cosine", 4)(r), 3) for r in (1, 2, 3, 4)]
    [1.0, 0.854, 0.5, 0.146]
    """
    if name == "constant":
        return lambda _: 1.0
    if name == "cosine":
        return lambda number: (1 + math.cos(math.pi * (number - 1) / rounds)) / 2
    if name != "step":
        raise FLError(f"unknown --lr-schedule {name!r}: there are {', '.join(SCHEDULES)}")
    if not all(0 < share < 1 for share in at) or not 0 < factor <= 1:
        raise FLError(f"--lr-factor lies in (0, 1] and --lr-steps in (0, 1), got {factor} and {','.join(map(str, at))}")
    ends = [max(1, math.floor(share * rounds + 1e-9)) for share in at]
    return lambda number: factor ** sum(number > end for end in ends)
