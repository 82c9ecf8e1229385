"""Commands of `python -m surgery`: signatures are command lines, docstrings help."""

from collections.abc import Callable

from surgery.commands.depth import graft, ungraft
from surgery.commands.look import check, inspect
from surgery.commands.merge import average, merge
from surgery.commands.parts import embed, extract
from surgery.commands.widths import align, narrow, permute, prune, widen

COMMANDS: dict[str, Callable[..., int | None]] = {
    command.__name__: command
    for command in (
        inspect, merge, average, narrow, prune, widen, graft, ungraft, permute, align, extract, embed, check
    )
}  # fmt: skip
"""By name, in the order in which help lists them; each gives its exit code, or None."""
