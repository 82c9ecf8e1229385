"""The weighted mean of submodels, each read where it lies: no model is ever embedded in full size."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.state import State, compute_dtype
from surgery.submodel import Index, Runs, Submodel, pieces
from surgery.submodel_checks import check_clients, client_scales, client_weights
from surgery.threads import in_threads
from surgery.transfer import upload

_SLAB = 1 << 18  # elements; the sum over the clients stays in the cache while each client is read once
_REGIONS = 32  # more are divided by a tensor of weights than one by one


class _Part(NamedTuple):
    """What one client has of one tensor of the full model: its share of the weight, its values, their place."""

    share: float
    factor: float  # of the values
    values: Tensor
    index: Index


def average_submodels(
    states: Sequence[Mapping[str, Tensor]],
    plans: Sequence[Submodel],
    fallback: Mapping[str, Tensor],
    weights: Tensor | Sequence[float] | None = None,
    dtype: torch.dtype | None = None,
    factors: Mapping[str, Tensor] | None = None,
) -> State:
    """The weighted mean, element by element of the full model, over the clients whose plan covers the element.

    Equal to embedding every state by its plan and taking `average(stack, weights, masks, fallback)`, in time linear
    in the elements of the states, and with no more memory than the result. HeteroFL's aggregation; NeFL's and FedFA's
    (Alg. 1, lines 16-22) as well: where a tensor has several sources, as a grafted block has, it counts at each. On
    the CPU several tensors are worked on at once, in as many threads as torch may use.

    Args:
        states: K small models' states.
        plans: where each lies; all of one full model.
        fallback: a state of the full model. Elements that nobody with weight covers keep its value.
        weights: [K], non-negative. None weighs all alike. A client of weight 0 takes no part, whatever it holds.
        dtype: torch.float64 to accumulate in float64; default is the tensor's own, float32 at least.
        factors: [K] by name of the full model's tensors, as `submodel_factors` gives them (on the CPU: they are read
            on the host). What client k has of a tensor is multiplied by its factor k; the weights it is divided by
            are not. Names left out keep factor 1; integers ignore theirs.

    Returns:
        A state of the full model with the fallback's dtypes and devices. Integer and boolean tensors are never
        averaged: the maximum over the clients that cover the element is carried.

    Raises:
        SurgeryError: for lengths that differ, plans of different full models, states that do not match their plan,
            a fallback that is not of the full model, weights that `average` would refuse, and factors for unknown
            tensors, of another shape or not finite.

    >>> from surgery.submodel import Source
    >>> narrow = Submodel({"w": (Source("w", (((0, 1),),)),)}, {"w": (3,)})
    >>> wide = Submodel({"w": (Source("w", (((0, 2),),)),)}, {"w": (3,)})
    >>> states = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0, 4.0])}]
    >>> average_submodels(states, [narrow, wide], {"w": torch.tensor([7.0, 8.0, 9.0])})
    {'w': tensor([2., 4., 9.])}
    """
    if dtype not in (None, torch.float32, torch.float64):
        raise SurgeryError(f"dtype is torch.float32 or torch.float64 to accumulate in, got {dtype}")
    check_clients(states, plans, fallback)
    row = client_weights(weights, len(states))
    members = row.nonzero().flatten().tolist()
    share = row / row.max() if members else row
    share = (share / share.sum()).clamp(min=1e-30).tolist()  # tiny weights still beat the fallback in float32
    scales = client_scales(factors, len(states), fallback)
    parts: dict[str, list[_Part]] = {name: [] for name in fallback}
    for c in members:
        for name, sources in plans[c].entries.items():
            for source in sources:
                factor = scales[source.name][c] if source.name in scales else 1.0
                parts[source.name].append(_Part(share[c], factor, states[c][name].detach(), source.index))

    def mean(name: str) -> Tensor:
        with torch.no_grad():  # the threads do not inherit it
            return _mean(name, fallback[name].detach(), parts[name], dtype)

    on_cpu = all(tensor.device.type == "cpu" for values in (fallback, *states) for tensor in values.values())
    order = sorted(fallback, key=lambda name: -fallback[name].numel())  # the longest first
    result = dict(zip(order, in_threads(mean, order) if on_cpu else map(mean, order)))
    return {name: result[name] for name in fallback}


def _mean(name: str, keep: Tensor, parts: list[_Part], dtype: torch.dtype | None) -> Tensor:
    """One tensor of the result, in slabs along its first axis."""
    numeric = keep.is_floating_point() or keep.is_complex()
    for part in parts:
        if (part.values.is_floating_point(), part.values.is_complex()) != (keep.is_floating_point(), keep.is_complex()):
            raise SurgeryError(f"tensor {name!r} is {keep.dtype} in the fallback and {part.values.dtype} in a state")
    if not parts or not keep.numel():
        return keep.clone()
    result = torch.empty_like(keep)
    if not keep.ndim:
        keep, parts = keep[None], [p._replace(values=p.values[None], index=(None,)) for p in parts]
    out = result.view(keep.shape) if not result.ndim else result
    accumulator = torch.int64 if not numeric else compute_dtype(keep.dtype)
    if numeric and dtype is not None:
        accumulator = torch.promote_types(accumulator, dtype)
    mass = _Mass(keep.shape, parts)
    step = max(1, _SLAB * keep.shape[0] // keep.numel())
    for start in range(0, keep.shape[0], step):
        target, old = out[start : start + step], keep[start : start + step]
        room = target if keep.dtype == accumulator else torch.empty_like(target, dtype=accumulator)
        total = (_sum if numeric else _maximum)(parts, room, start)
        for place, weight in mass.regions(start, start + target.shape[0]):
            if isinstance(weight, Tensor):
                weight = upload(weight, keep.device)
                value = total / weight.to(accumulator) if numeric else total
                target.copy_(torch.where(weight > 0, value, old.to(value)))
            elif weight == 0:
                target[place].copy_(old[place])
            elif numeric:
                torch.mul(total[place], 1 / weight, out=target[place])
            else:
                target[place].copy_(total[place])
    return result


def _sum(parts: list[_Part], total: Tensor, start: int) -> Tensor:
    """Into `total`, the slab that begins at `start`."""
    empty = True
    for part in parts:
        values, alpha = part.values, part.share * part.factor
        whole = values.shape[1:] == total.shape[1:] and part.index[0] is None
        if empty and whole and values.dtype == total.dtype and values.device == total.device:
            torch.mul(values[start : start + len(total)], alpha, out=total)  # the first to cover all saves zeros
        else:
            if empty:
                total.zero_()
            for place, piece in _within(part, total, start):
                place.add_(piece if piece.device == total.device else piece.to(total.device), alpha=alpha)
        empty = False
    return total


def _maximum(parts: list[_Part], total: Tensor, start: int) -> Tensor:
    """Integers of every width compare as int64."""
    total.fill_(torch.iinfo(total.dtype).min)
    for part in parts:
        for place, piece in _within(part, total, start):
            place.copy_(torch.maximum(place, piece.to(place)))
    return total


def _within(part: _Part, slab: Tensor, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of views (of the slab that begins at `start` of the first axis, of the part's values)."""
    length, first = slab.shape[0], part.index[0]
    if part.values.shape[1:] == slab.shape[1:] and first is None:
        yield slab, part.values[start : start + length]
        return
    if first is None:
        yield from pieces(slab, part.values.narrow(0, start, length), (None, *part.index[1:]))
        return
    runs = [
        (max(a, start) - start, min(b, start + length) - start) for a, b in first if a < start + length and b > start
    ]
    if not runs:
        return
    before = sum(min(b, start) - a for a, b in first if a < start)
    values = part.values.narrow(0, before, sum(b - a for a, b in runs))
    yield from pieces(slab, values, (tuple(runs), *part.index[1:]))


class _Mass:
    """The weight at each element: constant on the cells of the grid that the clients' runs cut the axes into."""

    def __init__(self, shape: Sequence[int], parts: list[_Part]):
        self.cuts = [
            sorted({0, size} | {end for part in parts for run in part.index[axis] or () for end in run})
            for axis, size in enumerate(shape)
        ]
        self.cells = torch.zeros([len(cuts) - 1 for cuts in self.cuts], dtype=torch.float64)
        for index in {part.index for part in parts}:
            covered = torch.tensor(math.fsum(part.share for part in parts if part.index == index), dtype=torch.float64)
            for cuts, runs in zip(self.cuts, index):
                covered = covered[..., None] * _indicator(cuts, runs)
            self.cells += covered

    def regions(self, start: int, stop: int) -> Iterator[tuple[tuple[slice, ...], float | Tensor]]:
        """The weights of a slab: numbers, with their places in it; or one tensor of its shape if it is cut too fine."""
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


def _indicator(cuts: list[int], runs: Runs | None) -> Tensor:
    """1 for each cell of an axis that lies in the runs, else 0."""
    if runs is None:
        return torch.ones(len(cuts) - 1, dtype=torch.float64)
    inside = torch.zeros(len(cuts) - 1, dtype=torch.float64)
    for start, stop in runs:
        inside[bisect_left(cuts, start) : bisect_left(cuts, stop)] = 1
    return inside
