"""mergekit's methods by those of `surgery.merge`: which parameters each takes, and what they are called here."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from torch import Tensor

from surgery import merge
from surgery.errors import SurgeryError
from surgery.lazy import LazyState, Pieces

NEEDED: Any = object()
"""The default of a parameter that has none."""
Own = Sequence[Mapping[str, Any]]
"""The settings of each model."""


@dataclass(frozen=True)
class Method:
    """A method of mergekit.

    Attributes:
        call: gives the merged state of (models, base, the settings of all, those of each model).
        shared: parameters that hold for all models, with their defaults.
        own: parameters that each model may have of its own, with their defaults.
        fixed: parameters of which one value is supported.
        base: what the base model is: none, needed or possible; "model" is one of the models, which has to come first.
        count: the number of models beside the base, or None for any.
    """

    call: Callable[[list[LazyState], LazyState | None, Mapping[str, Any], Own], Mapping]
    shared: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    base: Literal["none", "needed", "possible", "model"] = "none"
    count: int | None = None

    def check(self, name: str, models: Sequence[str], base: str | None) -> None:
        """SurgeryError unless it takes these models and this base."""
        if twice := [model for model in models if models.count(model) > 1]:
            raise SurgeryError(f"{twice[0]} is there twice among models that are merged: list it once")
        if base is None and self.base in ("needed", "model"):
            raise SurgeryError(f"{name} needs a base_model")
        count = len(self.models(models, base))
        if not count:
            raise SurgeryError(f"{name} has nothing to merge into the base_model {base}: list another model")
        if self.count is not None and count != self.count:
            beside = " beside the base_model" if base and self.base in ("needed", "possible") else ""
            raise SurgeryError(f"{name} takes {self.count} model{'s' * (self.count > 1)}{beside}, got {count}")

    def models(self, models: Sequence[str], base: str | None) -> list[str]:
        """The models that are merged: as mergekit does it, a base that is none to the method is one of them."""
        if base is None:
            return [*models]
        if self.base in ("needed", "possible"):
            return [model for model in models if model != base]
        if self.base == "model":
            return [base, *(model for model in models if model != base)]
        return [*models] if base in models or self.count == 1 else [*models, base]


def _of(own: Own, key: str) -> list[float]:
    return [float(one[key]) for one in own]


def _switch(key: str, value: Any) -> bool:
    if value not in (0, 1):
        raise SurgeryError(f"{key}: {value!r} is neither true nor false")
    return bool(value)


def _linear(models: list[LazyState], base: LazyState | None, shared: Mapping[str, Any], own: Own) -> Mapping:
    return merge.linear(models, weights=_of(own, "weight"), normalize=_switch("normalize", shared["normalize"]))


def _nuslerp(models: list[LazyState], base: LazyState | None, shared: Mapping[str, Any], own: Own) -> Mapping:
    first, second = _of(own, "weight")
    t = second / (first + second) if abs(first + second) >= 1e-6 else 0.5
    return merge.slerp(models, t=t, base=base)


def _passthrough(models: list[LazyState], base: LazyState | None, shared: Mapping[str, Any], own: Own) -> Mapping:
    scale, state = own[0]["scale"], models[0]
    if scale is None:
        return state
    every = {name: state.pieces(name) for name in state}
    scaled = {
        n: replace(p, read=partial(_scaled, p, float(scale))) for n, p in every.items() if p.dtype.is_floating_point
    }
    return LazyState(every | scaled)


def _scaled(pieces: Pieces, scale: float, start: int, stop: int) -> Tensor:
    return pieces.read(start, stop) * scale


def _task_vectors(
    method: Callable[..., Any],
    models: list[LazyState],
    base: LazyState,
    shared: Mapping[str, Any],
    own: Own,
    **fixed: Any,
) -> Mapping:
    weights = _of(own, "weight")
    if not any(weights):
        return base
    settings = {key: _of(own, key) for key in ("density", "gamma", "epsilon") if key in own[0]}
    if "epsilon" in settings:
        settings["epsilon"] = [2 * one for one in settings["epsilon"]]  # mergekit's is half of the width
    switches = {key: _switch(key, shared[key]) for key in ("normalize", "rescale") if key in shared}
    scale = float(shared["lambda"])
    return method(models, base=base, weights=weights, scale=scale, **settings, **switches, **fixed)


def _arithmetic(method: Callable[..., Any], *own: str, normalize: bool = False, **fixed: Any) -> Method:
    """A method of task vectors with parameters of each model beside their weights."""
    defaults = {"weight": NEEDED, "density": 1.0, "gamma": 0.01, "epsilon": 0.15}
    shared: dict[str, Any] = {"normalize": normalize, "lambda": 1.0}
    dare = method is merge.dare
    return Method(
        partial(_task_vectors, method, **fixed),
        shared | ({"rescale": True} if dare else {}),
        {key: defaults[key] for key in ("weight", *own)},
        {} if dare else {"rescale": method is merge.della},
        base="needed",
    )


def _based(method: Callable[..., Any], renamed: Mapping[str, str] | None = None) -> Callable[..., Mapping]:
    """A method that takes models, perhaps a base, and numbers for all, which may have other names here."""

    def call(models: list[LazyState], base: LazyState | None, shared: Mapping[str, Any], own: Own) -> Mapping:
        settings = {(renamed or {}).get(key, key): float(value) for key, value in shared.items()}
        return method(models, base=base, **settings)

    return call


def _multislerp(models: list[LazyState], base: LazyState | None, shared: Mapping[str, Any], own: Own) -> Mapping:
    return merge.multislerp(models, weights=_of(own, "weight"), base=base)


_STRAIGHT = math.acos(0.9995)  # the angle below which mergekit takes a straight line
METHODS: dict[str, Method] = {
    "linear": Method(_linear, {"normalize": True}, {"weight": NEEDED}),
    "slerp": Method(_based(partial(merge.slerp, straight=_STRAIGHT)), {"t": NEEDED}, base="model", count=2),
    "nuslerp": Method(
        _nuslerp, {}, {"weight": NEEDED}, {"nuslerp_flatten": True, "nuslerp_row_wise": False}, "possible", 2
    ),
    "multislerp": Method(_multislerp, {}, {"weight": NEEDED}, {"normalize_weights": True}, "possible"),
    "karcher": Method(_based(merge.karcher)),
    "task_arithmetic": _arithmetic(merge.task_arithmetic),
    "ties": _arithmetic(merge.ties, "density", normalize=True),
    "dare_linear": _arithmetic(merge.dare, "density"),
    "dare_ties": _arithmetic(merge.dare, "density", elect=True),
    "breadcrumbs": _arithmetic(merge.breadcrumbs, "density", "gamma"),
    "breadcrumbs_ties": _arithmetic(merge.breadcrumbs, "density", "gamma", elect=True),
    "della": _arithmetic(merge.della, "density", "epsilon", normalize=True, elect=True),
    "della_linear": _arithmetic(merge.della, "density", "epsilon", elect=False),
    "model_stock": Method(_based(merge.model_stock), fixed={"filter_wise": False}, base="needed"),
    "nearswap": Method(_based(merge.nearswap), {"t": NEEDED}, base="needed", count=1),
    "sce": Method(_based(merge.sce, {"select_topk": "select"}), {"select_topk": 1.0}, base="needed"),
    "passthrough": Method(_passthrough, {}, {"scale": None}, count=1),
}
"""By mergekit's names."""
