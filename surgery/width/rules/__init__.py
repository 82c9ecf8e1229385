"""What each aten operation does to axes: one rule for each kind of operation.

A rule gets the trace, the call's arguments by their names in the operation's schema, and the result. It assigns axes to
the result and unifies those that must be the same. It may return integers among the arguments that are sizes of axes (a
number of groups), so that the attributes that they come from can be corrected.
"""

from typing import Any

import torch

from surgery.width.rules import contractions, elementwise, norms, picking, shapes, windows  # noqa: F401, each adds its own
from surgery.width.rules.registry import RULES, Rule

ALIASES = {"_unsafe_view": "view", "reshape": "view", "_reshape_alias": "view"}
# The layout of memory may differ between a model and a narrower one, so these are not compared.
LAYOUT = {"clone", "contiguous", "detach", "alias", "_to_copy", "expand", "lift_fresh", "empty_like", "copy"}
# Operations whose arguments are sizes, and arguments that are sizes: the shapes of results show these.
CREATION = {"arange", "zeros", "ones", "full", "empty", "rand", "randn", "eye", "linspace", "randint", "randperm"}
SIZES = {
    "C", "HxW", "N", "end", "length", "normalized_shape", "output_size", "repeats", "sections", "self_size", "shape",
    "size", "sizes", "split_size", "split_sizes",
}  # fmt: skip
# Views in place, which give a tensor other axes.
REPLACING = {"squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_", "as_strided_"}


def rule_for(func: Any, name: str) -> Rule | None:
    """The rule for an operation, or None."""
    if name in RULES:
        return RULES[name]
    return elementwise.pointwise if torch.Tag.pointwise in func.tags else None
