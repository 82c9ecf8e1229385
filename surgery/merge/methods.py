"""The methods by name, for the command line and for recipes."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surgery.errors import SurgeryError
from surgery.merge.energy import sce
from surgery.merge.interpolation import karcher, linear, multislerp, nearswap, slerp
from surgery.merge.stock import model_stock
from surgery.merge.task_vectors import breadcrumbs, dare, della, task_arithmetic, ties


@dataclass(frozen=True)
class Method:
    """A method that needs nothing but models and numbers.

    Attributes:
        function: of this room.
        base: whether it needs a base ("needed"), takes one ("taken"), or none ("none").
        settings: the names of its settings with their defaults, without models, base and weights.
        weights: whether it takes weights.
    """

    function: Callable[..., Any]
    base: str
    settings: Mapping[str, Any]
    weights: bool


def _method(function: Callable[..., Any]) -> Method:
    taken = dict(inspect.signature(function).parameters)
    base = taken.get("base")
    kind = "none" if base is None else "needed" if base.default is base.empty else "taken"
    own = {name: p.default for name, p in taken.items() if name not in ("models", "base", "weights")}
    return Method(function, kind, own, "weights" in taken)


METHODS = {
    function.__name__: _method(function)
    for function in (
        linear, slerp, multislerp, karcher, nearswap, task_arithmetic, ties, dare, breadcrumbs, della, model_stock, sce
    )
}  # fmt: skip
"""By name; `fisher`, `regmean` and `greedy_soup` need more than models."""


def method(name: str) -> Method:
    """A method by its name; SurgeryError for an unknown one.

    >>> method("ties").base, method("slerp").settings
    ('needed', {'t': 0.5})
    """
    if name not in METHODS:
        raise SurgeryError(f"unknown method {name!r}: choose one of {', '.join(METHODS)}")
    return METHODS[name]
