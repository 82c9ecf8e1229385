"""Drive all methods: check models once, then merge each tensor slab by slab.

A method is a kernel, `kernel(group, **settings)`: it looks at one tensor of all models as far as it must, and returns
the function that merges a stretch of it. The driver finds the settings of each tensor, reads slabs in the dtype to
compute in, refuses what is not finite, and gives a lazy state if models are lazy.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from surgery.averaging.common import differing_masks
from surgery.errors import SurgeryError
from surgery.lazy import LazyState, Pieces, Reader, metas, pieces_of
from surgery.names import matches
from surgery.states import Models, State, as_state, check_same, compute_dtype, is_pruning_mask, unstack

Base: TypeAlias = Mapping[str, Tensor] | nn.Module
ByName: TypeAlias = float | Mapping[str, float]
"""A number for all tensors, or numbers by patterns of names, where the first that matches counts."""
ForEach: TypeAlias = float | Sequence[float] | Mapping[str, float | Sequence[float]]
"""The same, where a list has a number for each model."""
Weights: TypeAlias = Sequence[float] | Tensor | Mapping[str, Sequence[float]] | None
"""A weight for each model, or lists of them by patterns of tensor names; None gives all models the weight 1."""
Kernel: TypeAlias = Callable[..., Reader]


@dataclass(frozen=True)
class TensorGroup:
    """One tensor of all models with a weight other than 0.

    Attributes:
        name: the tensor's name.
        tensors: the tensor of each of these models.
        weights: the weights of these models, as given.
        places: the numbers of these models, from 0.
        base: the tensor of the base model, where the method takes one.
        whose: the names of these models in errors, and last the base's.
        shared: not empty once infinities were found that all models have: methods see 0 there.
    """

    name: str
    tensors: list[Pieces]
    weights: list[float]
    places: list[int]
    base: Pieces | None
    whose: list[str]
    shared: list[bool] = field(default_factory=list)

    @property
    def size(self) -> int:
        """The number of elements."""
        return self.tensors[0].size

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to compute in."""
        return max((compute_dtype(pieces.dtype) for pieces in self._every()), key=lambda dtype: dtype.itemsize)

    def _every(self) -> list[Pieces]:
        return self.tensors if self.base is None else [*self.tensors, self.base]

    def value(self, i: int, start: int, stop: int) -> Tensor:
        """Return a stretch of tensor i (the base's for -1) in the dtype to compute in.

        SurgeryError if it holds NaN, or infinity that others do not have.
        """
        values = self._every()[i].read(start, stop).to(self.dtype)
        # a sum shows them at a tenth of what looking at each element takes, and may be infinite for large numbers, too
        if bool(values.sum().isfinite()) or bool(values.isfinite().all()):
            return values
        infinite = values.isinf()
        others = (pieces.read(start, stop).to(self.dtype) for pieces in self._every())
        same = all(torch.equal(x.where(x.isinf(), 0), values.where(infinite, 0)) for x in others)
        if bool(values.isnan().any()) or not same:
            raise SurgeryError(
                f"{self.name!r} of {self.whose[i]} holds NaN or infinity: mend that model, or leave it out",
                code="values",
            )
        self.shared.append(True)
        return values.masked_fill(infinite, 0)

    def origin(self, start: int, stop: int) -> Tensor:
        """Return a stretch of the base."""
        return self.value(-1, start, stop)

    def delta(self, i: int, start: int, stop: int) -> Tensor:
        """Return a stretch of tensor i minus the base, or of tensor i if there is no base."""
        value = self.value(i, start, stop)
        return value if self.base is None else value - self.origin(start, stop)

    def shares(self) -> list[float]:
        """Return the weights over their sum; SurgeryError if it is 0, or one is negative."""
        total = sum(self.weights)
        if min(self.weights) < 0 or not total > 0:
            raise SurgeryError(
                f"the weights of {self.name!r} are {self.weights}: give positive ones, which are divided by their sum",
                code="argument",
            )
        return [weight / total for weight in self.weights]

    def merge(self, kernel: Kernel, settings: Mapping[str, Any], like: Pieces) -> Pieces:
        """Return a method's merged tensor in the shape and dtype of `like`."""
        lock, prepared = Lock(), []  # what the method needs to know of the whole, since the first reading

        def read(start: int, stop: int) -> Tensor:
            with torch.no_grad():
                with lock:
                    if not prepared:
                        prepared.append(kernel(self, **settings))
                exact = prepared[0](start, stop)
                result = exact.to(like.dtype)
                if result.dtype != exact.dtype and bool((exact.isfinite() & ~result.to(exact.dtype).isfinite()).any()):
                    raise SurgeryError(
                        f"the merged {self.name!r} does not fit into {like.dtype} (its largest number is "
                        f"{exact[exact.isfinite()].abs().max():.3g}): take a smaller scale, or convert the "
                        "models first",
                        code="values",
                    )
                if not self.shared:
                    return result
                first = self.tensors[0].read(start, stop).to(exact.dtype)
                return torch.where(first.isinf(), first, exact).to(like.dtype)

        def largest(start: int, stop: int) -> Tensor:
            values = [tensor.read(start, stop) for tensor in self.tensors]
            return torch.stack([value.to(torch.int64) for value in values]).amax(0).to(like.dtype)

        return Pieces(like.shape, like.dtype, read if like.dtype.is_floating_point else largest, like.device)

    def same_mask(self, like: Pieces) -> Pieces:
        """Return the mask that all have; reading it raises SurgeryError where two differ."""

        def read(start: int, stop: int) -> Tensor:
            first, *others = (pieces.read(start, stop) for pieces in self._every())
            if not all(torch.equal(first, other.to(first.dtype)) for other in others):
                raise differing_masks(self.name)
            return first.to(like.dtype)

        return Pieces(like.shape, like.dtype, read, like.device)


def merge_tensors(
    kernel: Kernel,
    models: Models,
    *,
    base: Base | None = None,
    weights: Weights = None,
    method: str = "this method",
    exactly: int | None = None,
    least: int = 1,
    settings: Mapping[str, tuple[Any, Any]] | None = None,
) -> State | LazyState:
    """Merge models tensor by tensor.

    Args:
        kernel: the method.
        models: a stack, or a list of states or modules; lazy states are not read.
        base: a state that task vectors start from.
        weights: of the models.
        method: the method's name in errors.
        exactly, least: how many models the method takes.
        settings: by name (a value or values by patterns of tensor names, the value where no pattern matches).

    Returns:
        A state of the first model's dtypes; a lazy one if a model or the base is lazy.
    """
    states, base = check_models(models, base)
    names, settings = list(states[0]), settings or {}
    if len(states) < least or (exactly and len(states) != exactly):
        raise SurgeryError(
            f"{method} merges {exactly or f'at least {least}'} models, not {len(states)}", code="argument"
        )
    rows = rows_of(weights, len(states), names)
    for setting, (value, _) in settings.items():
        check_patterns(setting, value, names)
        for item in value.values() if isinstance(value, Mapping) else [value]:
            if isinstance(item, list | tuple) and len(item) != len(states):
                raise SurgeryError(
                    f"{setting}={item!r} has {len(item)} numbers for {len(states)} models: give one each",
                    code="argument",
                )
    entries = {}
    for name in names:
        group = group_of(name, states, base, setting_of(name, rows, [1.0] * len(states)))
        tensor_settings = {setting: setting_of(name, *value) for setting, value in settings.items()}
        first = pieces_of(states[0], name)
        is_mask = is_pruning_mask(name, states[0])
        entries[name] = group.same_mask(first) if is_mask else group.merge(kernel, tensor_settings, first)
    result = LazyState(entries)
    lazy = any(isinstance(values, LazyState) for values in (*states, base))
    return result if lazy else {name: result[name] for name in names}


def group_of(
    name: str, states: Sequence[Mapping[str, Tensor]], base: Mapping[str, Tensor] | None, weights: Sequence[float]
) -> TensorGroup:
    """Group one tensor of the states that have a weight other than 0."""
    places = [k for k, weight in enumerate(weights) if weight]
    if not places:
        raise SurgeryError(f"all models have the weight 0 for {name!r}: give one of them a weight", code="argument")
    whose = [getattr(states[k], "label", "") or f"model {k} (from 0)" for k in places]
    tensors, group_weights = [pieces_of(states[k], name) for k in places], [weights[k] for k in places]
    whose.append(getattr(base, "label", "") or "the base")
    return TensorGroup(name, tensors, group_weights, places, None if base is None else pieces_of(base, name), whose)


def check_models(
    models: Models, base: Base | None = None
) -> tuple[list[Mapping[str, Tensor]], Mapping[str, Tensor] | None]:
    """Return models and base as states; SurgeryError unless names and shapes agree."""
    if isinstance(models, LazyState | nn.Module):
        raise SurgeryError("one model cannot be merged: give a list, or surgery.stack of them", code="argument")
    if isinstance(models, Mapping):
        models = unstack(models)
    if not isinstance(models, list | tuple):
        raise SurgeryError(
            f"models are a stack or a list of states or modules, not a {type(models).__name__}", code="argument"
        )
    if not models:
        raise SurgeryError("there are no models to merge: give at least one", code="argument")
    given = [(f"model {k}", model) for k, model in enumerate(models)] + ([] if base is None else [("the base", base)])
    states = [model if isinstance(model, LazyState) else as_state(model, label) for label, model in given]
    labels = [getattr(values, "label", "") or label for values, (label, _) in zip(states, given)]  # such as a file
    first, first_label = states[0], labels[0]
    for label, values in zip(labels, states):
        check_same(metas(first), metas(values), first_label, label)
        for name in values:
            tensor, reference = pieces_of(values, name), pieces_of(first, name)
            if tensor.dtype.is_complex:
                raise SurgeryError(f"{name!r} of {label} is {tensor.dtype}: try surgery.average", code="unsupported")
            if tensor.dtype.is_floating_point != reference.dtype.is_floating_point:
                raise SurgeryError(
                    f"tensor {name!r} is {reference.dtype} in {first_label}, {tensor.dtype} in {label}: convert one",
                    code="mismatch",
                )
            if tensor.device != reference.device:
                raise SurgeryError(
                    f"tensor {name!r} is on {reference.device} in {first_label}, {tensor.device} in {label}: move one",
                    code="mismatch",
                )
            if tensor.device.type == "meta":
                raise SurgeryError(f"tensor {name!r} of {label} is on the meta device: load it first", code="values")
    return states[: len(models)], None if base is None else states[-1]


def require_base(base: Base | None) -> Base:
    """Return the base; SurgeryError if there is none."""
    if base is None:
        raise SurgeryError("task vectors need a base: give the model that was fine-tuned as base=...", code="argument")
    return base


def check_range(
    name: str, value: Any, low: float, high: float, *, open_low: bool = False, per_model: bool = False
) -> Any:
    """Return the setting; SurgeryError unless all numbers are from `low` to `high`.

    With `per_model` it may have lists of numbers, one for each model.

    >>> check_range("density", {"*": 0.5}, 0, 1), check_range("density", [0.5, 1.0], 0, 1, per_model=True)
    ({'*': 0.5}, [0.5, 1.0])
    """
    way_out = ", or numbers by name of tensors" + ", or a list with one for each model" * per_model
    for key, value_there in value.items() if isinstance(value, Mapping) else [("", value)]:
        for item in value_there if per_model and isinstance(value_there, list | tuple) else [value_there]:
            check_number(
                name, item, low, high, open_low=open_low, where=f" for {key!r}" if key else "", way_out=way_out
            )
    return value


def check_number(
    name: str, value: Any, low: float = -math.inf, high: float = math.inf, *, open_low: bool = False, where: str = "",
    way_out: str = "",
) -> float:  # fmt: skip
    """Return the argument; SurgeryError unless finite and from `low` to `high`.

    >>> check_number("rate", 0.5, 0, 1, open_low=True)
    0.5
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SurgeryError(f"{name}={value!r}{where} is not a finite number: give one{way_out}", code="argument")
    if not low <= value <= high or (open_low and value == low):
        above = "above" if open_low else "at least"
        limit = "" if high == math.inf else f" and at most {high:g}"
        raise SurgeryError(f"{name}={value:g}{where} is out of range: give {above} {low:g}{limit}", code="argument")
    return value


def check_switch(name: str, value: Any) -> bool:
    """Return the argument; SurgeryError unless it is true or false.

    >>> check_switch("normalize", False)
    False
    """
    if not isinstance(value, bool):
        raise SurgeryError(f"{name}={value!r}: give true or false, without quotes", code="argument")
    return value


def setting_of(name: str, value: Any, default: Any) -> Any:
    """Return what a setting is for one tensor.

    >>> setting_of("layer1.conv.weight", {"layer1": 0.2, "*": 0.5}, 1.0), setting_of("fc.bias", {"layer1": 0.2}, 1.0)
    (0.2, 1.0)
    """
    if not isinstance(value, Mapping):
        return value
    return next((match for pattern, match in value.items() if matches(name, pattern)), default)


def check_patterns(setting: str, value: Any, names: Iterable[str]) -> None:
    """Raise SurgeryError if a setting has a pattern that matches no tensor."""
    names = list(names)
    for pattern in value if isinstance(value, Mapping) else ():
        if not isinstance(pattern, str):
            raise SurgeryError(f"{setting} has the pattern {pattern!r}: give a text such as 'layer4'", code="argument")
        if not any(matches(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=3)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"names are such as {names[0]!r}"
            raise SurgeryError(f"{setting}: no tensor matches {pattern!r}: {hint}", code="name")


def rows_of(weights: Weights, k: int, names: Iterable[str]) -> list[float] | dict[str, list[float]]:
    """Return weights as k finite floats, for all or by pattern; else SurgeryError."""

    def numbers(row: Any, where: str) -> list[float]:
        try:
            row_weights = [float(weight) for weight in (row.tolist() if isinstance(row, Tensor) else row)]
        except (TypeError, ValueError):
            raise SurgeryError(f"weights{where} are {k} numbers, not {row!r:.60}", code="argument") from None
        if len(row_weights) != k:
            raise SurgeryError(f"weights{where} are {k} numbers, not {row_weights}", code="argument")
        if not all(map(math.isfinite, row_weights)):
            raise SurgeryError(f"weights{where} must be finite numbers, got {row_weights}", code="argument")
        return row_weights

    check_patterns("weights", weights, names)
    if isinstance(weights, Mapping):
        return {pattern: numbers(row, f" for {pattern!r}") for pattern, row in weights.items()}
    return [1.0] * k if weights is None else numbers(weights, "")
