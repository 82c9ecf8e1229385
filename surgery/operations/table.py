"""All operations by name, and the check of what they are given."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from surgery.errors import SurgeryError
from surgery.merge import METHODS
from surgery.operations import changes, mixtures, orders
from surgery.operations.subject import Subject

SUBJECTS = ("model", "models", "base", "into", "first", "others", "to")
"""Arguments that are checkpoints."""
PATHS = ("plan", "permutations")
"""Arguments that are files."""
MEASURED: dict[str, Callable[..., Subject]] = {
    "fisher": mixtures.fisher,
    "regmean": mixtures.regmean,
    "greedy_soup": mixtures.greedy_soup,
}
"""Merge methods that need data or a score."""


def _by_numbers(name: str) -> Callable[..., Subject]:
    """A method of `surgery.merge` that needs checkpoints and numbers, as an operation."""
    method = METHODS[name]

    def operation(models: Any, **settings: Any) -> Subject:
        every = [*models, *([settings["base"]] if settings.get("base") is not None else [])]
        if any(model.module for model in every):  # of tied tensors these have one name only, and so must the others
            for model in every:
                if model.described:
                    model.built()
        if "base" in settings and settings["base"] is not None:
            settings["base"] = settings["base"].values
        values = method([model.values for model in models], **settings)
        return models[0].alike(values)

    operation.__signature__ = inspect.signature(method)
    return operation


OPERATIONS: dict[str, Callable[..., Any]] = {
    **{name: _by_numbers(name) for name in METHODS},
    **MEASURED,
    "passthrough": mixtures.passthrough,
    "narrow": changes.narrow,
    "prune": changes.prune,
    "graft": changes.graft,
    "ungraft": changes.ungraft,
    "permute": orders.permute,
    "align": orders.align,
    "widen": changes.widen,
    "shuffle": mixtures.shuffle,
    "extract": changes.extract,
    "embed": changes.embed,
    "replace": mixtures.replace,
    "cast": changes.cast,
}
"""By name; each gives a subject, `shuffle` a list of them."""


def check_arguments(do: str, given: Mapping[str, Any]) -> None:
    """SurgeryError unless there is such an operation, and it takes these arguments."""
    if do not in OPERATIONS:
        raise SurgeryError(f"unknown operation {do!r}: choose one of {', '.join(OPERATIONS)}")
    takes = inspect.signature(OPERATIONS[do]).parameters
    if odd := [name for name in given if name not in takes]:
        raise SurgeryError(f"{do} takes no {odd[0]!r}, but {', '.join(takes)}")
    if lacking := [name for name, p in takes.items() if p.default is p.empty and name not in given]:
        raise SurgeryError(f"{do} needs {lacking[0]!r}")


def merge_method(name: str) -> Mapping[str, inspect.Parameter]:
    """What a merge method takes; SurgeryError for an unknown one.

    >>> list(merge_method("slerp"))
    ['models', 't', 'base']
    """
    methods = [*METHODS, *MEASURED]
    if name not in methods:
        near = difflib.get_close_matches(name, methods, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(methods)}"
        raise SurgeryError(f"unknown method {name!r}: {hint}")
    return inspect.signature(OPERATIONS[name]).parameters
