"""What the commands do with checkpoints.

An operation is a function whose signature says all that a command line has to know: which arguments are
checkpoints, how the others are written, and what they may be.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, get_args

from surgery.merging import METHODS
from surgery.operations import mixtures, models, states
from surgery.operations.arguments import type_and_kind
from surgery.operations.checkpoint import Model

MERGES: dict[str, Callable[..., Model]] = {
    **{name: mixtures.by_numbers(name) for name in METHODS},
    "fisher": mixtures.fisher,
    "regmean": mixtures.regmean,
    "greedy_soup": mixtures.greedy_soup,
}
"""The methods of merging by name; the last three need data or a score."""

OPERATIONS: dict[str, Callable[..., Any]] = {
    **MERGES,
    "narrow": models.narrow,
    "prune": models.prune,
    "graft": models.graft,
    "ungraft": models.ungraft,
    "permute": models.permute,
    "align": models.align,
    "widen": models.widen,
    "extract": states.extract,
    "embed": states.embed,
}
"""By name."""


def carry_out(do: str, given: Mapping[str, Any]) -> Any:
    """What an operation makes of its arguments; each is checked by its annotation, but None where it is the default."""
    takes, arguments = inspect.signature(OPERATIONS[do]).parameters, dict(given)
    for name, value in given.items():
        if value is not None or takes[name].default is not None:
            arguments[name] = type_and_kind(takes[name].annotation)[1].check(name, value)
    return OPERATIONS[do](**arguments)


def checkpoints(do: str) -> dict[str, type]:
    """The arguments of an operation that are checkpoints, with what holds them: a Model, or a list of them.

    >>> {name: kind.__name__ for name, kind in checkpoints("embed").items()}, checkpoints("ties")["models"]
    ({'model': 'Model', 'into': 'Model'}, <class 'list'>)
    """
    found: dict[str, type] = {}
    for name, parameter in inspect.signature(OPERATIONS[do]).parameters.items():
        kind = type_and_kind(parameter.annotation)[0]
        inside = [type_and_kind(one)[0] for one in get_args(kind)]
        if kind is Model:
            found[name] = Model
        elif Model in inside:
            found[name] = list
    return found
