"""Means of submodels, weighted or trimmed, and FedFA's factors that scale them.

No model is held in full size but for the trimmed mean.
"""

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from surgery.averaging import same_mask, trimmed_mean, weight_rows
from surgery.errors import SurgeryError
from surgery.plan.positions import Index, Runs, ascending, grid, pieces, put, repeats, scattered
from surgery.plan.submodel import Plan
from surgery.scale import checked_groups, joint_norms, matching_factors
from surgery.states import State, as_state, check_same_shapes, compute_dtype, is_pruning_mask, shapes_of
from surgery.threads import in_threads
from surgery.transfer import upload

_SLAB = 1 << 18  # elements; small enough for the sum over the clients to stay in the cache
_REGIONS = 32  # up to so many are divided one by one, more by a tensor of weights


class _Part(NamedTuple):
    """What one client has of one tensor of the full model: its share of the weight, its values and their place."""

    client: int
    share: float
    factor: float  # that the values are multiplied by
    values: Tensor
    index: Index  # type: ignore[assignment]  # tuples have a method of this name


def average_submodels(
    states: Sequence[Mapping[str, Tensor]],
    plans: Sequence[Plan],
    *,
    weights: Tensor | Sequence[float] | None = None,
    factors: Mapping[str, Tensor] | None = None,
    fallback: Mapping[str, Tensor],
    dtype: torch.dtype | None = None,
    trim: float | None = None,
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
        trim: in [0, 0.5]; the result is the `trimmed_mean` over the clients that cover the element. Of a weight only
            whether it is zero matters then, and one tensor of the full model is held for each client at a time.

    Returns:
        A state of the full model with the fallback's dtypes and devices. Integer and boolean tensors are never
        averaged: the result is the maximum over the clients that cover the element. Neither are masks of
        torch.nn.utils.prune, which have to be the same where several clients cover an element.

    Raises:
        SurgeryError: for different numbers of states and plans, plans of different full models, states that do not
            match their plans, a fallback that is not of the full model, weights that `average` would refuse, factors
            that are for unknown tensors, of a wrong shape or not finite, and everything that `trimmed_mean` refuses.

    >>> from surgery.plan import Source
    >>> narrow = Plan({"w": (Source("w", (((0, 1),),)),)}, {"w": (3,)})
    >>> wide = Plan({"w": (Source("w", (((0, 2),),)),)}, {"w": (3,)})
    >>> states = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0, 4.0])}]
    >>> average_submodels(states, [narrow, wide], fallback={"w": torch.tensor([7.0, 8.0, 9.0])})
    {'w': tensor([2., 4., 9.])}
    """
    if dtype is not None and (not isinstance(dtype, torch.dtype) or dtype not in (torch.float32, torch.float64)):
        raise SurgeryError(f"dtype must be torch.float32 or torch.float64, got {str(dtype)[:40]}")
    if dtype is not None and trim is not None:
        raise SurgeryError("dtype is that of a weighted mean: a trimmed one has the tensors' own, so give one")
    states, fallback = _client_states(states), as_state(fallback, "the fallback")
    _check_clients(states, plans, fallback)
    row = _client_weights(weights, len(states))
    members = row.nonzero().flatten().tolist()
    share = row / row.max() if members else row
    shares = (share / share.sum()).clamp(min=1e-30).tolist()  # tiny weights must not vanish in float32
    scales = _scales(factors, len(states), fallback)
    parts: dict[str, list[_Part]] = {name: [] for name in fallback}
    for c in members:
        for full, held in plans[c].parts.items():
            factor = scales[full][c] if full in scales else 1.0
            parts[full] += [_Part(c, shares[c], factor, states[c][name].detach(), index) for name, index in held]

    def mean(name: str) -> Tensor:
        keep = fallback[name].detach()
        for part in parts[name]:
            kinds = [(one.is_floating_point(), one.is_complex()) for one in (keep, part.values)]
            if kinds[0] != kinds[1]:
                raise SurgeryError(
                    f"tensor {name!r} is {keep.dtype} in the fallback and {part.values.dtype} in a state"
                )
        with torch.no_grad():  # threads do not inherit it from the caller
            if is_pruning_mask(name, fallback):
                return same_mask(name, *_embedded(keep, [part._replace(factor=1) for part in parts[name]]), keep)
            return _mean(keep, parts[name], dtype) if trim is None else _trimmed(name, keep, parts[name], trim)

    if trim is not None:
        return {name: mean(name) for name in fallback}
    on_cpu = all(tensor.device.type == "cpu" for values in (fallback, *states) for tensor in values.values())
    order = sorted(fallback, key=lambda name: -fallback[name].numel())  # the longest first
    result = dict(zip(order, in_threads(mean, order) if on_cpu else map(mean, order)))
    return {name: result[name] for name in fallback}


def submodel_factors(
    states: Sequence[Mapping[str, Tensor]],
    plans: Sequence[Plan],
    *,
    q: float = 0.95,
    groups: Sequence[Sequence[str]] | None = None,
    weights: Tensor | Sequence[float] | None = None,
    measure: Literal["norm", "rms"] = "norm",
) -> dict[str, Tensor]:
    """The factors that scale each tensor of different small models to the mean of their percentile norms.

    alpha_c = mean_k ||Wq_k|| / ||Wq_c|| (FedFA, Alg. 1, line 18), where k runs over the clients that have weight and
    cover something of the tensor. Equal to the factors that `match_norms` gives for the embedded models of these
    clients with their masks. `average_submodels(states, plans, weights=..., factors=..., fallback=...)` then does lines
    16-22.

    Args:
        states: K small models' states.
        plans: where each state lies, all in one full model. A tensor with several sources, as in a grafted block,
            counts at each of them.
        q: the quantile, in [0, 1]; see `percentile_norm`.
        groups: names of the full model's tensors that have one norm and one factor together, as
            `segments(layers(model))` gives them. A client's norm is that of the tensors that it has of them. By default
            each tensor is a group.
        weights: [K], non-negative: clients of weight 0 are ignored, all others count alike. None: all count.
        measure: `norm` is the paper's. `rms` divides it by the square root of the number of entries in it, so that a
            narrow model is not scaled up merely because it has fewer entries.

    Returns:
        [K], float64, on the CPU, by name of the full model's tensors, except those that are integers in the states. A
        client without weight, with nothing of the group or with only zeros (or almost, see `match_norms`) gets factor 1
        and is not counted in the mean; tensors in no group have factor 1.

    Raises:
        SurgeryError: for q out of range, an unknown measure, states that do not match their plans, groups that name a
            tensor twice or an unknown one, and for NaN or infinity in a state with weight.

    >>> from surgery.plan import Source
    >>> narrow = Plan({"w": (Source("w", (((0, 1),),)),)}, {"w": (2,)})
    >>> wide = Plan({"w": (Source("w", (None,)),)}, {"w": (2,)})
    >>> states = [{"w": torch.tensor([3.0])}, {"w": torch.tensor([3.0, 4.0])}]
    >>> submodel_factors(states, [narrow, wide], q=1.0)["w"]
    tensor([1.3333, 0.8000], dtype=torch.float64)
    """
    if not isinstance(measure, str) or measure not in ("norm", "rms"):
        raise SurgeryError(f"unknown measure {repr(measure)[:40]}: choose norm or rms")
    states = _client_states(states)
    _check_clients(states, plans)
    members = _client_weights(weights, len(states)).nonzero().flatten().tolist()
    small = [
        # An index matters only if it repeats positions, of which one counts.
        {full: [(n, index if repeats(index) else ()) for n, index in held] for full, held in plan.parts.items()}
        for plan in plans
    ]
    integers = {
        full
        for c, held in enumerate(small)
        for full, own in held.items()
        if not all(states[c][n].is_floating_point() or states[c][n].is_complex() for n, _ in own)
    }
    floating = {name: None for name in plans[0].shapes if name not in integers}
    groups = checked_groups(groups, plans[0].shapes, floating, "the full model")
    # A block that stands for others has the same norm everywhere, so it is computed only once.
    rows: dict[tuple[int, tuple[tuple[str, Index], ...]], int] = {}
    place = torch.zeros(len(groups), len(states), dtype=torch.int64)  # of the norm of each group and client; 0 for none
    for g, group in enumerate(groups):
        for c in members:
            own = (part for name in group for part in small[c].get(name, ()))
            if held := tuple(sorted(own, key=lambda part: (part[0], str(part[1])))):
                place[g, c] = rows.setdefault((c, held), len(rows) + 1)
    jobs = [[ascending(states[c][n].detach(), index)[0] for n, index in held] for c, held in rows]
    found = joint_norms([[], *jobs], q)
    norms = found[:, 0] if measure == "norm" else found[:, 0] / found[:, 1].sqrt().clamp(min=1)
    alpha = matching_factors(norms[place])
    for g, c in norms[place].isnan().nonzero()[:1].tolist():
        raise SurgeryError(f"{', '.join(groups[g])} of state {c} hold NaN or infinity: give this client weight 0")
    factors = {name: row for group, row in zip(groups, alpha) for name in group}
    return {name: factors.get(name, torch.ones(len(states), dtype=torch.float64)) for name in floating}


def _client_states(states: Sequence[Mapping[str, Tensor] | nn.Module]) -> list[Mapping[str, Tensor]]:
    """A list of states, of which some may have been given as modules; SurgeryError for anything else."""
    if not isinstance(states, list | tuple):
        raise SurgeryError(f"give a list of states, one for each client, not a {type(states).__name__}")
    return [as_state(values, f"state {k}") for k, values in enumerate(states)]


def _check_clients(
    states: Sequence[Mapping[str, Tensor]], plans: Sequence[Plan], fallback: Mapping[str, Tensor] | None = None
) -> None:
    """SurgeryError unless each state matches its plan, and all plans (and the fallback) are of one full model."""
    if not isinstance(plans, list | tuple) or not all(isinstance(plan, Plan) for plan in plans):
        raise SurgeryError("give a list of plans (surgery.Plan), one for each state")
    if len(states) != len(plans) or not states:
        raise SurgeryError(
            f"{len(states)} states and {len(plans)} plans: give one plan for each state, and at least one state"
        )
    first = plans[0].fingerprint
    for k, (values, plan) in enumerate(zip(states, plans)):
        if plan.fingerprint != first:
            raise SurgeryError(
                f"plan {k} is of the full model {plan.fingerprint}, plan 0 of {first}: "
                "only submodels of one full model can be averaged"
            )
        check_same_shapes(plan.small_shapes, shapes_of(values), f"plan {k}", f"state {k}")
    if fallback is not None:
        check_same_shapes(plans[0].shapes, shapes_of(fallback), "the plans' full model", "the fallback")


def _client_weights(weights: Tensor | Sequence[float] | None, k: int) -> Tensor:
    """Weights [K] in float64 on the CPU; SurgeryError if they are not valid."""
    row = weight_rows(weights, k, True)
    if row.ndim != 1:
        raise SurgeryError(f"weights have shape {tuple(row.shape)}: expected [{k}], one for each client")
    return row


def _scales(
    factors: Mapping[str, Tensor | Sequence[float]] | None, k: int, full: Mapping[str, Tensor]
) -> dict[str, list[float]]:
    """Factors [K] by name of the full model's tensors as numbers; SurgeryError if they are not valid."""
    try:
        given = {name: torch.as_tensor(factor) for name, factor in (factors or {}).items()}
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SurgeryError(f"factors are numbers [{k}] by name, as submodel_factors gives them: {error}") from None
    for name, factor in given.items():
        if name not in full:
            raise SurgeryError(f"factors name {name!r}, but the full model has no such tensor")
        if factor.shape != (k,):
            raise SurgeryError(
                f"factors of {name!r} have shape {tuple(factor.shape)}: expected [{k}], one for each client"
            )
    scales = {name: factor.tolist() for name, factor in given.items()}
    if bad := [name for name, row in scales.items() if not all(map(math.isfinite, row))]:
        raise SurgeryError(f"factors of {bad[0]!r} are {scales[bad[0]]}: they must be finite")
    return scales


def _trimmed(name: str, keep: Tensor, parts: list[_Part], trim: float) -> Tensor:
    """One tensor of the trimmed mean, of the clients' values embedded."""
    values, covered = _embedded(keep, parts)
    return trimmed_mean({name: values}, trim=trim, mask={name: covered}, fallback={name: keep})[name]


def _embedded(keep: Tensor, parts: list[_Part]) -> tuple[Tensor, Tensor]:
    """The clients' values in the full tensor, [clients, *S], and where they are."""
    rows = {client: row for row, client in enumerate(dict.fromkeys(part.client for part in parts))}
    values = keep.new_zeros(max(1, len(rows)), *keep.shape)
    covered = torch.zeros_like(values, dtype=torch.bool)
    for part in parts:
        scaled = part.values * part.factor if part.factor != 1 and keep.is_floating_point() else part.values
        put(values[rows[part.client]], part.index, scaled)
        put(covered[rows[part.client]], part.index, covered.new_ones(part.values.shape))
    return values, covered


def _mean(keep: Tensor, parts: list[_Part], dtype: torch.dtype | None) -> Tensor:
    """One tensor of the weighted mean, in slabs along its first axis."""
    numeric = keep.is_floating_point() or keep.is_complex()
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
            _update(total, part, start, partial(Tensor.add_, alpha=alpha))
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
