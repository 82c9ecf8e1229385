"""What all methods share: models are checked once, then each tensor is merged by a function of slabs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.lazy import LazyState, Pieces, Reader, metas, pieces_of
from surgery.merge.settings import Weights, check_patterns, of_tensor, weight_list
from surgery.states import Models, State, as_state, check_same, compute_dtype, unstack


@dataclass(frozen=True)
class Group:
    """One tensor of the models that count.

    Attributes:
        name: of the tensor.
        tensors: of the models that have a weight other than 0.
        weights: of these models, as given.
        places: which models they are, from 0.
        base: the tensor of the base model, where the method takes one.
        whose: what errors call these models, and last the base.
        shared: not empty if infinities were found that all of them share: methods see 0 there.
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
    def is_float(self) -> bool:
        """Whether its elements are floating-point numbers."""
        return self.tensors[0].dtype.is_floating_point

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to compute in."""
        every = [*self.tensors, *([self.base] if self.base else [])]
        return max((compute_dtype(pieces.dtype) for pieces in every), key=lambda dtype: dtype.itemsize)

    def value(self, i: int, start: int, stop: int) -> Tensor:
        """A stretch of tensor i, in the dtype to compute in."""
        return self._finite(self.tensors[i], start, stop, self.whose[i])

    def origin(self, start: int, stop: int) -> Tensor:
        """A stretch of the base, in the dtype to compute in."""
        return self._finite(self.base, start, stop, self.whose[-1])

    def _finite(self, pieces: Pieces, start: int, stop: int, whose: str) -> Tensor:
        """A stretch in the dtype to compute in; SurgeryError if it holds NaN, or infinity that others do not have."""
        values = pieces.read(start, stop).to(self.dtype)
        # a sum shows them at a tenth of what looking at each element takes, and may be infinite for large numbers, too
        if bool(values.sum().isfinite()) or bool(values.isfinite().all()):
            return values
        infinite = values.isinf()
        every = [other.read(start, stop) for other in (*self.tensors, *([self.base] if self.base else []))]
        same = all(
            torch.equal(other.where(other.isinf(), 0), values.where(infinite, 0).to(other.dtype)) for other in every
        )
        if bool(values.isnan().any()) or not same:
            raise SurgeryError(
                f"{self.name!r} of {whose} holds NaN or infinity, and so would the result: mend that model, or leave "
                "it out"
            )
        self.shared.append(True)
        return values.masked_fill(infinite, 0)

    def restored(self, result: Tensor, start: int, stop: int) -> Tensor:
        """A stretch of the result with the infinities that all models share."""
        if not self.shared:
            return result
        first = self.tensors[0].read(start, stop)
        return first.to(result.dtype).where(first.isinf(), result)

    def delta(self, i: int, start: int, stop: int) -> Tensor:
        """What tensor i adds to the base: a stretch of its task vector, or of the tensor itself without a base."""
        value = self.value(i, start, stop)
        return value if self.base is None else value - self.origin(start, stop)

    def shares(self) -> list[float]:
        """The weights divided by their sum; SurgeryError if that is 0, or a weight negative."""
        total = sum(self.weights)
        if min(self.weights) < 0 or not total > 0:
            raise SurgeryError(
                f"the weights of {self.name!r} are {self.weights}: they are divided by their sum, so give numbers that "
                "are not negative"
            )
        return [weight / total for weight in self.weights]


Kernel = Callable[..., Reader]
"""A method for one tensor: kernel(group, **settings) looks at the whole and returns a function of stretches."""


def merged(
    kernel: Kernel,
    models: Models,
    *,
    base: Mapping[str, Tensor] | nn.Module | None = None,
    weights: Weights = None,
    exactly: int | None = None,
    least: int = 1,
    defaults: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    own: Mapping[str, Callable[[str, list[int]], Any]] | None = None,
) -> State | LazyState:
    """Merge models tensor by tensor.

    Args:
        kernel: the method.
        models: a stack, or a list of states or modules; lazy states are not read.
        base: a state that task vectors start from.
        weights: of the models.
        exactly, least: how many models the method takes.
        defaults: by setting what it is for tensors that no pattern matches.
        settings: by name, each a value or values by patterns of tensor names.
        own: further settings, each a function of the tensor's name and of which models count.

    Returns:
        A state of the first model's dtypes; a lazy one if a model or the base is lazy.
    """
    states, base, names = aligned(models, base)
    if len(states) < least or (exactly and len(states) != exactly):
        raise SurgeryError(f"this method merges {exactly or f'at least {least}'} models, got {len(states)}")
    rows, defaults, settings = weight_list(weights, len(states), names), defaults or {}, settings or {}
    for setting, value in settings.items():
        check_patterns(setting, value, names)
    entries = {}
    for name in names:
        row = of_tensor(name, rows, [1.0] * len(states))
        places = [k for k, weight in enumerate(row) if weight]
        if not places:
            raise SurgeryError(f"all models have the weight 0 for {name!r}: give at least one of them a weight")
        group = group_of(name, [states[k] for k in places], base, [row[k] for k in places], places)
        chosen = {setting: of_tensor(name, value, defaults.get(setting)) for setting, value in settings.items()}
        chosen |= {setting: find(name, places) for setting, find in (own or {}).items()}
        entries[name] = _entry(kernel, group, chosen, pieces_of(states[0], name))
    result = LazyState(entries)
    with torch.no_grad():
        lazy = any(isinstance(values, LazyState) for values in (*states, base))
        return result if lazy else {name: result[name] for name in names}


def aligned(
    models: Models, base: Mapping[str, Tensor] | nn.Module | None
) -> tuple[list[Mapping[str, Tensor]], Mapping[str, Tensor] | None, list[str]]:
    """The models and the base as states, and the names of their tensors; SurgeryError if they do not fit."""
    states = _states(models)
    if base is not None:
        base = base if isinstance(base, LazyState) else as_state(base, "the base")
    return states, base, _check(states, base)


def group_of(
    name: str,
    states: Sequence[Mapping[str, Tensor]],
    base: Mapping[str, Tensor] | None,
    weights: Sequence[float] | None = None,
    places: Sequence[int] | None = None,
) -> Group:
    """One tensor of some states."""
    weights, places = weights or [1.0] * len(states), places or range(len(states))
    called = [*((f"model {k} (from 0)", values) for k, values in zip(places, states)), ("the base", base)]
    whose = [getattr(values, "what", "") or default for default, values in called]
    tensors = [pieces_of(values, name) for values in states]
    return Group(name, tensors, [*weights], [*places], None if base is None else pieces_of(base, name), whose)


def _entry(kernel: Kernel, group: Group, settings: Mapping[str, Any], like: Pieces) -> Pieces:
    if like.dtype.is_floating_point:
        lock, prepared = Lock(), []  # what it needs to know of the whole, since the first reading

        def read(start: int, stop: int) -> Tensor:
            with torch.no_grad():
                with lock:
                    if not prepared:
                        prepared.append(kernel(group, **settings))
                return group.restored(prepared[0](start, stop).to(like.dtype), start, stop)

    else:

        def read(start: int, stop: int) -> Tensor:
            values = [tensor.read(start, stop) for tensor in group.tensors]
            return torch.stack([value.to(torch.int64) for value in values]).amax(0).to(like.dtype)

    return Pieces(like.shape, like.dtype, read, like.device)


def _states(models: Models) -> list[Mapping[str, Tensor]]:
    if isinstance(models, LazyState | nn.Module):
        raise SurgeryError("one model cannot be merged: give a list of models, or surgery.stack of them")
    if isinstance(models, Mapping):
        return unstack(models)
    if not isinstance(models, list | tuple):
        raise SurgeryError(f"models must be a stack or a list of states or modules, not a {type(models).__name__}")
    states = [
        values if isinstance(values, LazyState) else as_state(values, f"model {k}") for k, values in enumerate(models)
    ]
    if not states:
        raise SurgeryError("there are no models to merge: give at least one")
    return states


def _check(states: Sequence[Mapping[str, Tensor]], base: Mapping[str, Tensor] | None) -> list[str]:
    """The names of all tensors; SurgeryError unless all models have the same names, shapes and kinds of numbers."""
    every = [(f"model {k}", values) for k, values in enumerate(states)] + ([("the base", base)] if base else [])
    first = metas(states[0])
    for what, values in every:
        own = metas(values)
        check_same(first, own, "model 0", what)
        for name, tensor in own.items():
            here, there = pieces_of(values, name), pieces_of(states[0], name)
            if tensor.is_complex():
                raise SurgeryError(
                    f"tensor {name!r} of {what} is {tensor.dtype}: average complex tensors by surgery.average"
                )
            if tensor.is_floating_point() != first[name].is_floating_point():
                raise SurgeryError(
                    f"tensor {name!r} is {first[name].dtype} in model 0 and {tensor.dtype} in {what}: convert one"
                )
            if here.device != there.device:
                raise SurgeryError(
                    f"tensor {name!r} is on {there.device} in model 0 and on {here.device} in {what}: move one"
                )
            if here.device.type == "meta":
                raise SurgeryError(
                    f"tensor {name!r} of {what} has no data (meta device): give the model its weights first"
                )
    return list(first)
