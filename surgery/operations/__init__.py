"""What the commands and the steps of recipes do with checkpoints: each operation once, for both.

An operation is a function whose signature says all that a command line or a recipe has to know: which arguments are
checkpoints, how the others are written, and what they may be.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args, get_origin

from surgery.errors import SurgeryError
from surgery.merge import METHODS
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
    "passthrough": mixtures.passthrough,
    "narrow": models.narrow,
    "prune": models.prune,
    "graft": models.graft,
    "ungraft": models.ungraft,
    "permute": models.permute,
    "align": models.align,
    "fit": models.fit,
    "widen": models.widen,
    "shuffle": mixtures.shuffle,
    "extract": states.extract,
    "embed": states.embed,
    "replace": states.replace,
    "cast": states.cast,
    "fold": states.fold,
}
"""By name; each gives a model, `shuffle` a list of them."""


def carry_out(do: str, given: Mapping[str, Any]) -> Any:
    """What an operation makes of its arguments; each is checked by its annotation, but None where it is the default."""
    takes, arguments = inspect.signature(OPERATIONS[do]).parameters, dict(given)
    for name, value in given.items():
        if value is not None or takes[name].default is not None:
            arguments[name] = type_and_kind(takes[name].annotation)[1].check(name, value)
    return OPERATIONS[do](**arguments)


def checkpoints(do: str) -> dict[str, type]:
    """The arguments of an operation that are checkpoints, with what holds them: a Model, a list or a dict of them.

    >>> {name: kind.__name__ for name, kind in checkpoints("embed").items()}, checkpoints("shuffle")
    ({'model': 'Model', 'into': 'Model'}, {'models': <class 'list'>})
    """
    found: dict[str, type] = {}
    for name, parameter in inspect.signature(OPERATIONS[do]).parameters.items():
        kind = type_and_kind(parameter.annotation)[0]
        inside = [type_and_kind(one)[0] for one in get_args(kind)]
        if kind is Model:
            found[name] = Model
        elif Model in inside:
            found[name] = list if get_origin(kind) is Sequence else dict
    return found


def check_arguments(do: str, given: Mapping[str, Any]) -> None:
    """SurgeryError unless there is such an operation, and it takes these arguments."""
    if do not in OPERATIONS:
        near = difflib.get_close_matches(do, OPERATIONS, n=3)
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"choose one of {', '.join(OPERATIONS)}"
        raise SurgeryError(f"unknown operation {do!r}: {hint}")
    takes = inspect.signature(OPERATIONS[do]).parameters
    if odd := [name for name in given if name not in takes]:
        raise SurgeryError(f"{do} takes no {odd[0]!r}, but {', '.join(takes)}")
    if lacking := [name for name, p in takes.items() if p.default is p.empty and name not in given]:
        raise SurgeryError(f"{do} needs {lacking[0]!r}")
