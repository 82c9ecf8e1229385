"""Means of models of different sizes, which plans place in one full model.

No model is held in full size, unless something takes the place of the mean.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from surgery.averaging.common import Reduce, Weights, reduce_tensor, weight_rows
from surgery.errors import SurgeryError
from surgery.plan import Index, Plan, Ranges
from surgery.plan.positions import ascending, grid, is_scatter_faster, pieces, put
from surgery.states import (
    Models,
    State,
    as_state,
    check_same_shapes,
    compute_dtype,
    is_pruning_mask,
    shapes_of,
    unstack,
)
from surgery.threads import in_threads
from surgery.transfer import upload

_SLAB = 1 << 18  # elements; small enough for the sum over the clients to stay in the cache
_REGIONS = 32  # up to this number they are divided one by one, beyond it by a tensor of weights


class _ClientPart(NamedTuple):
    """One client's part of a full tensor: its share of the weight, values and place."""

    client: int
    share: float
    factor: float  # that the values are multiplied by
    values: Tensor
    index: Index  # type: ignore[assignment]  # tuples have a method of this name


def average_parts(
    models: Models,
    plans: Sequence[Plan],
    weights: Weights,
    fallback: Mapping[str, Tensor] | nn.Module | None,
    factors: Mapping[str, Tensor | Sequence[float]] | None,
    reduce: Reduce | None,
) -> State:
    """Average models that plans place in one full model, see `combine`."""
    states = client_states(models, plans)
    if fallback is None:
        raise SurgeryError("plans may leave elements uncovered: give a full state as `fallback`", code="argument")
    fallback = as_state(fallback, "the fallback")
    check_same_shapes(plans[0].shapes, shapes_of(fallback), "the plans' full model", "the fallback")
    row = client_weights(weights, len(states))
    members = row.nonzero().flatten().tolist()
    share = row / row.max() if members else row
    shares = (share / share.sum()).clamp(min=1e-30).tolist()  # tiny weights must not vanish in float32
    scales = _scales(factors, len(states), fallback)
    parts: dict[str, list[_ClientPart]] = {name: [] for name in fallback}
    for c in members:
        for full, held in plans[c].parts.items():
            factor = scales[full][c] if full in scales else 1.0
            parts[full] += [_ClientPart(c, shares[c], factor, states[c][name].detach(), index) for name, index in held]

    def mean(name: str) -> Tensor:
        old, tensor_parts = fallback[name].detach(), parts[name]
        for part in tensor_parts:
            kinds = [(tensor.is_floating_point(), tensor.is_complex()) for tensor in (old, part.values)]
            if kinds[0] != kinds[1]:
                raise SurgeryError(f"{name!r} is {old.dtype} in the fallback, not {part.values.dtype}", code="mismatch")
        with torch.no_grad():  # threads do not inherit it from the caller
            numeric = old.is_floating_point() or old.is_complex()
            if reduce is None and numeric and not is_pruning_mask(name, fallback):
                return _mean(old, tensor_parts)
            if not numeric or is_pruning_mask(name, fallback):
                tensor_parts = [part._replace(factor=1.0) for part in tensor_parts]
            # integers are compared as they are in states
            values, covered = _embedded(old if numeric else old.to(torch.int64), tensor_parts)
            return reduce_tensor(name, fallback, values, covered, old.to(values), reduce).to(old)

    if reduce is not None:
        return {name: mean(name) for name in fallback}
    on_cpu = all(tensor.device.type == "cpu" for values in (fallback, *states) for tensor in values.values())
    order = sorted(fallback, key=lambda name: -fallback[name].numel())  # the longest first
    result = dict(zip(order, in_threads(mean, order) if on_cpu else map(mean, order)))
    return {name: result[name] for name in fallback}


def client_states(models: Models, plans: Sequence[Plan]) -> list[Mapping[str, Tensor]]:
    """Return the models as states; SurgeryError unless each matches its plan.

    All plans must be of one full model.
    """
    if isinstance(models, Mapping):
        models = unstack(models)
    if not isinstance(models, list | tuple):
        raise SurgeryError(f"give a list of states, one for each plan, not a {type(models).__name__}", code="argument")
    states = [as_state(values, f"state {k}") for k, values in enumerate(models)]
    if not isinstance(plans, list | tuple) or not all(isinstance(plan, Plan) for plan in plans):
        raise SurgeryError("plans are a list of surgery.Plan; give weights by name, weights=[...]", code="argument")
    if len(states) != len(plans) or not states:
        raise SurgeryError(f"{len(states)} states and {len(plans)} plans: give one plan for each", code="argument")
    first = plans[0].fingerprint
    for k, (values, plan) in enumerate(zip(states, plans)):
        if plan.fingerprint != first:
            raise SurgeryError(
                f"plans 0 and {k} are of different full models ({first}, {plan.fingerprint}): give plans of one",
                code="mismatch",
            )
        check_same_shapes(plan.small_shapes, shapes_of(values), f"plan {k}", f"state {k}")
    return states


def client_weights(weights: Weights, k: int) -> Tensor:
    """Return weights [K] in float64 on the CPU; SurgeryError if they are not valid."""
    row = weight_rows(weights, k, True)
    if row.ndim != 1:
        raise SurgeryError(f"weights have shape {tuple(row.shape)}: expected [{k}], one a client", code="argument")
    return row


def _scales(
    factors: Mapping[str, Tensor | Sequence[float]] | None, k: int, full: Mapping[str, Tensor]
) -> dict[str, list[float]]:
    """Return factors [K] by the full model's names; SurgeryError if not valid."""
    try:
        tensors = {name: torch.as_tensor(factor) for name, factor in (factors or {}).items()}
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SurgeryError(f"factors are numbers [{k}] by name: {error}", code="argument") from None
    for name, factor in tensors.items():
        if name not in full:
            raise SurgeryError(f"factors name {name!r}, but the full model has no such tensor", code="name")
        if factor.shape != (k,):
            raise SurgeryError(f"factors of {name!r} have shape {tuple(factor.shape)}: expected [{k}]", code="argument")
    scales = {name: factor.tolist() for name, factor in tensors.items()}
    if bad := [name for name, row in scales.items() if not all(map(math.isfinite, row))]:
        raise SurgeryError(f"factors of {bad[0]!r} are {scales[bad[0]]}: they must be finite", code="argument")
    return scales


def _embedded(keep: Tensor, parts: list[_ClientPart]) -> tuple[Tensor, Tensor]:
    """Return the clients' values in the full tensor, [clients, *S], and their places."""
    rows = {client: row for row, client in enumerate(dict.fromkeys(part.client for part in parts))}
    values = keep.new_zeros(max(1, len(rows)), *keep.shape)
    covered = torch.zeros_like(values, dtype=torch.bool)
    for part in parts:
        scaled = part.values if part.factor == 1 else part.values * part.factor
        put(values[rows[part.client]], part.index, scaled)
        put(covered[rows[part.client]], part.index, covered.new_ones(part.values.shape))
    return values, covered


def _mean(keep: Tensor, parts: list[_ClientPart]) -> Tensor:
    """Return one tensor of the weighted mean, in slabs along its first axis."""
    if not parts or not keep.numel():
        return keep.clone()
    for number, part in enumerate(parts):
        values, index = ascending(part.values, part.index)
        parts[number] = part._replace(values=values, index=index)
    result = torch.empty_like(keep)
    if not keep.ndim:
        keep, parts = keep[None], [p._replace(values=p.values[None], index=(None,)) for p in parts]
    out = result.view(keep.shape) if not result.ndim else result
    accumulator = compute_dtype(keep.dtype)
    mass = _Mass(keep.shape, parts)
    step = max(1, _SLAB * keep.shape[0] // keep.numel())
    for start in range(0, keep.shape[0], step):
        target, old = out[start : start + step], keep[start : start + step]
        room = target if keep.dtype == accumulator else torch.empty_like(target, dtype=accumulator)
        total = _sum(parts, room, start)
        for place, weight in mass.regions(start, start + target.shape[0]):
            if isinstance(weight, Tensor):
                weight = upload(weight, keep.device)
                value = total / weight.to(accumulator)
                target.copy_(torch.where(weight > 0, value, old.to(value)))
            elif weight == 0:
                target[place].copy_(old[place])
            else:
                torch.mul(total[place], 1 / weight, out=target[place])
    return result


def _sum(parts: list[_ClientPart], total: Tensor, start: int) -> Tensor:
    """Return the weighted sum of the slab that begins at `start`, computed in `total`."""
    empty = True
    for part in parts:
        values, alpha = part.values, part.share * part.factor
        whole = values.shape[1:] == total.shape[1:] and part.index[0] is None
        if empty and whole and values.dtype == total.dtype and values.device == total.device:
            torch.mul(values[start : start + len(total)], alpha, out=total)  # saves filling with zeros
        else:
            if empty:
                total.zero_()
            _add(total, part, start, alpha)
        empty = False
    return total


def _add(slab: Tensor, part: _ClientPart, start: int, alpha: float) -> None:
    """Add alpha times a part's share of a slab, which begins at `start`, in place."""
    overlap = _within(part, slab, start)
    if overlap is None:
        return
    values, index = overlap
    if values.device != slab.device:
        values = values.to(slab.device)
    if is_scatter_faster(index):
        where = grid(index, slab)
        slab[where] = slab[where].add_(values, alpha=alpha)
        return
    for place, piece in pieces(slab, values, index):
        place.add_(piece, alpha=alpha)


def _within(part: _ClientPart, slab: Tensor, start: int) -> tuple[Tensor, Index] | None:
    """Return the part's values in a slab and their index in it; None if it has none."""
    length, first = slab.shape[0], part.index[0]
    if first is None:
        return part.values.narrow(0, start, length), (None, *part.index[1:])
    runs = [
        (max(a, start) - start, min(b, start + length) - start) for a, b in first if a < start + length and b > start
    ]
    if not runs:
        return None
    before = sum(min(b, start) - a for a, b in first if a < start)
    return part.values.narrow(0, before, sum(b - a for a, b in runs)), (tuple(runs), *part.index[1:])


class _Mass:
    """The sum of weights at each element, as a grid of cells with one value each."""

    def __init__(self, shape: Sequence[int], parts: list[_ClientPart]):
        self.cuts = [
            sorted({0, size} | {end for part in parts for run in part.index[axis] or () for end in run})
            for axis, size in enumerate(shape)
        ]
        self.cells = torch.zeros([len(cuts) - 1 for cuts in self.cuts], dtype=torch.float64)
        for index in dict.fromkeys(part.index for part in parts):  # a set's order, of tuples with None, is random
            covered = torch.tensor(math.fsum(part.share for part in parts if part.index == index), dtype=torch.float64)
            for cuts, runs in zip(self.cuts, index):
                covered = covered[..., None] * _indicator(cuts, runs)
            self.cells += covered

    def regions(self, start: int, stop: int) -> Iterator[tuple[tuple[slice, ...], float | Tensor]]:
        """Yield the weights of a slab: numbers with places, or one tensor for a fine grid."""
        first, last = bisect_left(self.cuts[0], start + 1) - 1, bisect_left(self.cuts[0], stop)
        cells = self.cells[first:last]
        low, high = cells.aminmax()
        cuts = [[0, *(cut - start for cut in self.cuts[0][first + 1 : last]), stop - start], *self.cuts[1:]]
        if low == high:
            yield (slice(None),), low.item()
        elif cells.numel() > _REGIONS:
            for axis, ends in enumerate(cuts):
                cells = cells.repeat_interleave(torch.tensor(ends).diff(), axis)
            yield (slice(None),), cells
        else:
            ranges = [list(map(slice, ends, ends[1:])) for ends in cuts]
            yield from zip(itertools.product(*ranges), cells.flatten().tolist())


def _indicator(cuts: list[int], runs: Ranges | None) -> Tensor:
    """1 for each cell of an axis that lies in the ranges, else 0."""
    if runs is None:
        return torch.ones(len(cuts) - 1, dtype=torch.float64)
    inside = torch.zeros(len(cuts) - 1, dtype=torch.float64)
    for start, stop in runs:
        inside[bisect_left(cuts, start) : bisect_left(cuts, stop)] = 1
    return inside
