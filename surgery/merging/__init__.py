"""Merge models of one architecture, a stack or list of them, into one state.

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

from surgery.merging.assembly import passthrough as passthrough
from surgery.merging.assembly import union as union
from surgery.merging.averages import Soup as Soup
from surgery.merging.averages import fisher as fisher
from surgery.merging.averages import greedy_soup as greedy_soup
from surgery.merging.averages import linear as linear
from surgery.merging.averages import regmean as regmean
from surgery.merging.information import fisher_information as fisher_information
from surgery.merging.information import input_grams as input_grams
from surgery.merging.registration import METHODS as METHODS
from surgery.merging.registration import register_method as register_method
from surgery.merging.spheres import karcher as karcher
from surgery.merging.spheres import model_stock as model_stock
from surgery.merging.spheres import multislerp as multislerp
from surgery.merging.spheres import slerp as slerp
from surgery.merging.task_vectors import breadcrumbs as breadcrumbs
from surgery.merging.task_vectors import dare as dare
from surgery.merging.task_vectors import della as della
from surgery.merging.task_vectors import nearswap as nearswap
from surgery.merging.task_vectors import sce as sce
from surgery.merging.task_vectors import task_arithmetic as task_arithmetic
from surgery.merging.task_vectors import ties as ties

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
