"""The commands of `python -m surgery`: one file each, which is imported when its command is called.

Files import what takes long (PyTorch) within `run`, so that help is printed at once.
"""

from typing import NamedTuple


class Command(NamedTuple):
    """A command: the module and the dataclass of its arguments, which has a method `run`, and what it does."""

    module: str
    arguments: str
    does: str


COMMANDS = {
    "inspect": Command("surgery.commands.inspect", "Inspect", "print layers, sections and coupled widths of a model"),
    "merge": Command("surgery.commands.merge", "Merge", "merge checkpoints by one of twelve methods"),
    "average": Command("surgery.commands.average", "Average", "average checkpoints"),
    "diff": Command("surgery.commands.diff", "Diff", "say which tensors of two checkpoints differ, and by how much"),
}
"""By name, in the order in which help lists them."""
