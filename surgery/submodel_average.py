"""The weighted mean of submodels. No model is ever embedded in full size."""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.states import State, as_state, compute_dtype
from surgery.submodel import Submodel
from surgery.submodel_checks import check_clients, client_scales, client_states, client_weights
from surgery.submodel_index import Index, Runs, ascending, grid, pieces, scattered
from surgery.threads import in_threads
from surgery.transfer import upload

_SLAB = 1 << 18  # elements; small enough for the sum over the clients to stay in the cache
_REGIONS = 32  # up to so many are divided one by one, more by a tensor of weights


class _Part(NamedTuple):
    """What one client has of one tensor of the full model: its share of the weight, its values and their place."""

    share: float
    factor: float  # that the values are multiplied by
    values: Tensor
    index: Index


def average_submodels(
    states: Sequence[Mapping[str, Tensor]],
    plans: Sequence[Submodel],
    *,
    weights: Tensor | Sequence[float] | None = None,
    factors: Mapping[str, Tensor] | None = None,
    fallback: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
) -> State:
    """The weighted mean, element by element of the full model, over the clients whose plan covers the element.

    Equal to embedding every state by its plan and taking `average` with weights, masks and fallback, but in time linear
    in the number of elements of the states, and without more memory than that of the result. This is the aggregation of
    HeteroFL, NeFL and FedFA (Alg. 1, lines 16-22): a tensor with several sources, as in a grafted block, counts at each
    of them, and of positions that repeat (in a wider model) the first does. On the CPU several tensors are averaged at
    once, in as many threads as torch may use. What is not in ascending order is first copied, one tensor at a time.

    Args:
        states: K small models' states (or the modules).
        plans: where each state lies, all in one full model.
        weights: [K], non-negative. None gives all clients the same weight. A client of weight 0 is ignored, even if it
            holds NaN.
        factors: [K] by name of the full model's tensors, as `submodel_factors` gives them (on the CPU, since they are
            read on the host). Client k's values of a tensor are multiplied by factor k; the weights that their sum is
            divided by are not. Names left out have factor 1; integer tensors ignore theirs.
        fallback: a state of the full model, with the values for elements that no client with weight covers.
        dtype: torch.float64 to accumulate in float64; by default the tensor's own, at least float32.

    Returns:
        A state of the full model with the fallback's dtypes and devices. Integer and boolean tensors are never
        averaged: the result is the maximum over the clients that cover the element.

    Raises:
        SurgeryError: for different numbers of states and plans, plans of different full models, states that do not
            match their plans, a fallback that is not of the full model, weights that `average` would refuse, and
            factors that are for unknown tensors, of a wrong shape or not finite.

    >>> from surgery.submodel import Source
    >>> narrow = Submodel({"w": (Source("w", (((0, 1),),)),)}, {"w": (3,)})
    >>> wide = Submodel({"w": (Source("w", (((0, 2),),)),)}, {"w": (3,)})
    >>> states = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0, 4.0])}]
    >>> average_submodels(states, [narrow, wide], fallback={"w": torch.tensor([7.0, 8.0, 9.0])})
    {'w': tensor([2., 4., 9.])}
    """
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float64)):
        raise SurgeryError(f"dtype must be torch.float32 or torch.float64, got {str(dtype)[:40]}")
    states, fallback = client_states(states), as_state(fallback, "the fallback")
    check_clients(states, plans, fallback)
    row = client_weights(weights, len(states))
    members = row.nonzero().flatten().tolist()
    share = row / row.max() if members else row
    share = (share / share.sum()).clamp(min=1e-30).tolist()  # tiny weights must not vanish in float32
    scales = client_scales(factors, len(states), fallback)
    parts: dict[str, list[_Part]] = {name: [] for name in fallback}
    for c in members:
        for name, sources in plans[c].entries.items():
            for source in sources:
                factor = scales[source.name][c] if source.name in scales else 1.0
                parts[source.name].append(_Part(share[c], factor, states[c][name].detach(), source.index))

    def mean(name: str) -> Tensor:
        with torch.no_grad():  # threads do not inherit it from the caller
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
    for number, part in enumerate(parts):
        values, index = ascending(part.values, part.index)
        parts[number] = part._replace(values=values, index=index)
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
    """The weighted sum of the slab that begins at `start`, computed in `total`."""
    empty = True
    for part in parts:
        values, alpha = part.values, part.share * part.factor
        whole = values.shape[1:] == total.shape[1:] and part.index[0] is None
        if empty and whole and values.dtype == total.dtype and values.device == total.device:
            torch.mul(values[start : start + len(total)], alpha, out=total)  # saves filling with zeros
        else:
            if empty:
                total.zero_()
            _update(total, part, start, lambda place, piece, alpha=alpha: place.add_(piece, alpha=alpha))
        empty = False
    return total


def _maximum(parts: list[_Part], total: Tensor, start: int) -> Tensor:
    """The maximum of the slab that begins at `start`, computed as int64 in `total`."""
    total.fill_(torch.iinfo(total.dtype).min)
    for part in parts:
        _update(total, part, start, lambda place, piece: place.copy_(torch.maximum(place, piece.to(place))))
    return total


def _update(slab: Tensor, part: _Part, start: int, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Change the elements of a slab that a part has, in place; the slab begins at `start` of the first axis."""
    found = _within(part, slab, start)
    if found is None:
        return
    values, index = found
    if values.device != slab.device:
        values = values.to(slab.device)
    if scattered(index):
        where = grid(index, slab)
        slab[where] = change(slab[where], values)
        return
    for place, piece in pieces(slab, values, index):
        change(place, piece)


def _within(part: _Part, slab: Tensor, start: int) -> tuple[Tensor, Index] | None:
    """The part's values in a slab and their index in it; None if it has none."""
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
    """The sum of weights at each element: constant in each cell of the grid that the ends of all ranges make."""

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
        """The weights of a slab: numbers with their places in it, or for a fine grid one tensor of the slab's shape."""
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
    """1 for each cell of an axis that lies in the ranges, else 0."""
    if runs is None:
        return torch.ones(len(cuts) - 1, dtype=torch.float64)
    inside = torch.zeros(len(cuts) - 1, dtype=torch.float64)
    for start, stop in runs:
        inside[bisect_left(cuts, start) : bisect_left(cuts, stop)] = 1
    return inside
