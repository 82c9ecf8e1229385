"""The commands of `python -m surgery`."""

from collections.abc import Callable
from typing import Any

from surgery.commands import read, write

_OF_OPERATIONS = (
    "narrow", "prune", "widen", "graft", "ungraft", "permute", "align", "fit", "extract", "embed", "fold"
)  # fmt: skip

COMMANDS: dict[str, Callable[..., Any]] = {
    "inspect": read.inspect,
    "merge": write.merge,
    "passthrough": write.command_of("passthrough"),
    "average": write.average,
    "shuffle": write.command_of("shuffle"),
    "diff": read.diff,
    **{do: write.command_of(do) for do in _OF_OPERATIONS},
    "extract-adapter": write.extract_adapter,
    "plan": read.plan,
    "check": read.check,
    "apply": write.apply,
}
"""By name, in the order in which help lists them; each gives its exit code, or None."""
