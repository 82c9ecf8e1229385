"""Merging of models of one architecture: a function takes a stack, or a list of states or modules, and gives a state.

Every method works tensor by tensor. Settings are a number for all tensors, or numbers by patterns of tensor names
(`{"layer4": 0.2, "*.bias": 0.5, "*": 1.0}`: the first pattern that matches a name, or the beginning of one up to a dot,
counts; tensors that no pattern matches have the default). Where a setting says how a model's task vector is made sparse
(density, gamma, epsilon), a list with a number for each model may stand in place of a number. Models of weight 0 are
ignored, even if they hold NaN; NaN or infinity in any other model, in the base, or in what weights are measured by, is
an error (infinities that all models share, as masks of attention do, stay).
Integer and boolean tensors (step counters, tables of positions) are never averaged: the result has the maximum over the
models that count, as in `surgery.average`. States of files (`surgery.files.open_state`) are merged piece by piece.
`register_method` adds a method of your own.
"""

from collections.abc import Callable
from typing import Any

from surgery.merging.assembly import passthrough, union
from surgery.merging.averages import Soup, fisher, greedy_soup, linear, regmean
from surgery.merging.information import fisher_information, input_grams
from surgery.merging.registration import METHODS, register_method
from surgery.merging.spheres import karcher, model_stock, multislerp, slerp
from surgery.merging.task_vectors import breadcrumbs, dare, della, nearswap, sce, task_arithmetic, ties

METHODS.update({
    method.__name__: method
    for method in (
        linear, slerp, multislerp, karcher, nearswap, task_arithmetic, ties, dare, breadcrumbs, della, model_stock, sce
    )
})  # fmt: skip


def __getattr__(name: str) -> Callable[..., Any]:
    """Give a method that was registered later."""
    if name in METHODS:
        return METHODS[name]
    raise AttributeError(f"module 'surgery.merging' has no attribute {name!r}")


__all__ = [
    "METHODS",
    "Soup",
    "breadcrumbs",
    "dare",
    "della",
    "fisher",
    "fisher_information",
    "greedy_soup",
    "input_grams",
    "karcher",
    "linear",
    "model_stock",
    "multislerp",
    "nearswap",
    "passthrough",
    "register_method",
    "regmean",
    "sce",
    "slerp",
    "task_arithmetic",
    "ties",
    "union",
]
