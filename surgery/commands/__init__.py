"""The commands of `python -m surgery`."""

from collections.abc import Callable
from typing import Any

from surgery.commands import read, write

_OF_OPERATIONS = ("narrow", "prune", "widen", "graft", "ungraft", "permute", "align", "extract", "embed")

COMMANDS: dict[str, Callable[..., Any]] = {
    "inspect": read.inspect,
    "merge": write.merge,
    "average": write.average,
    **{do: write.command_of(do) for do in _OF_OPERATIONS},
    "check": read.check,
}
"""By name, in the order in which help lists them; each gives its exit code, or None."""
