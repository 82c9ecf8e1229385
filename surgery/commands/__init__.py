"""The commands of `python -m surgery`."""

from collections.abc import Callable
from typing import Any

from surgery.commands import look, write

_OF_OPERATIONS = (
    "narrow", "prune", "widen", "graft", "ungraft", "permute", "align", "extract", "embed"
)  # fmt: skip

COMMANDS: dict[str, Callable[..., Any]] = {
    "inspect": look.inspect,
    "merge": write.merge,
    "passthrough": write.command_of("passthrough"),
    "average": write.average,
    "shuffle": write.command_of("shuffle"),
    "diff": look.diff,
    **{do: write.command_of(do) for do in _OF_OPERATIONS},
    "plan": look.plan,
    "check": look.check,
    "apply": write.apply,
}
"""By name, in the order in which help lists them; each gives its exit code, or None."""
