"""Rules for what operations do to axes: one for each kind of operation.

A rule is a function of what it may ask (a `View`), the call's arguments by their names in the operation's schema, and
the result. It unifies axes that are the same and fixes axes that must keep their size. It returns the axes of the
result, or a `RuleResult` if there is more to say. `register_rule` adds one for an operation of your own; all that such
a rule needs is here.
"""

from surgery.width.axes import (
    Axis,
    concatenation,
    fix,
    lost,
    mark_grouping,
    picked,
    product,
    regroup,
    role,
    segment,
    unify,
)
from surgery.width.rules import (  # noqa: F401, each adds its own
    contractions,
    elementwise,
    norms,
    picking,
    shapes,
    windows,
)
from surgery.width.rules.notation import register_rule
from surgery.width.rules.registry import RuleResult, View, broadcast, fresh

__all__ = [
    "Axis",
    "RuleResult",
    "View",
    "broadcast",
    "concatenation",
    "fix",
    "fresh",
    "lost",
    "mark_grouping",
    "picked",
    "product",
    "register_rule",
    "regroup",
    "role",
    "segment",
    "unify",
]
