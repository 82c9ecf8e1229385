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
    "inspect": Command(
        "surgery.commands.inspect", "Inspect", "print what a checkpoint holds, or a model's layers and widths"
    ),
    "merge": Command("surgery.commands.merge", "Merge", "merge checkpoints by one of fifteen methods"),
    "passthrough": Command(
        "surgery.commands.passthrough", "Passthrough", "put a network together from blocks of several"
    ),
    "average": Command("surgery.commands.average", "Average", "average checkpoints"),
    "shuffle": Command("surgery.commands.shuffle", "Shuffle", "exchange layers between checkpoints"),
    "diff": Command("surgery.commands.diff", "Diff", "say which tensors of two checkpoints differ, and by how much"),
    "narrow": Command("surgery.commands.width", "Narrow", "keep the first positions of every hidden width"),
    "prune": Command("surgery.commands.width", "Prune", "keep the most important positions, down to a given size"),
    "widen": Command("surgery.commands.width", "Widen", "make every hidden width wider; the outputs stay"),
    "graft": Command("surgery.commands.depth", "Graft", "repeat the last blocks of sections"),
    "ungraft": Command("surgery.commands.depth", "Ungraft", "keep the first blocks of sections"),
    "permute": Command("surgery.commands.orders", "Permute", "put widths in another order; the outputs stay"),
    "align": Command("surgery.commands.orders", "Align", "put widths in the order of another checkpoint's"),
    "extract": Command("surgery.commands.plans", "Extract", "cut a small model out of a checkpoint by a plan"),
    "embed": Command("surgery.commands.plans", "Embed", "lay a small model back into the large one by its plan"),
    "plan": Command("surgery.commands.plans", "PlanCommand", "print a plan, or compose several"),
    "check": Command("surgery.commands.check", "Check", "say what surgery can do to a model of yours, and what not"),
    "apply": Command("surgery.commands.apply", "Apply", "carry out the steps of a recipe"),
}
"""By name, in the order in which help lists them."""
