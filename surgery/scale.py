"""Scale models of different architectures, tensor by tensor, to the same norm.

FedFA (Flexible Architectures, ECML-PKDD 2024; two other methods share the name), Algorithm 1, lines 12-22. Small models
have larger weights than large ones and would dominate the mean. The norm is over the entries up to a quantile of
their magnitudes; it is found for many tensors at once, without sorting them.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from numbers import Real
from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor

from surgery.averaging.plans import client_states, client_weights
from surgery.averaging.stacks import check_mask
from surgery.decomposition import check_segments
from surgery.errors import SurgeryError
from surgery.plan import Index, Plan
from surgery.plan.positions import ascending, repeats
from surgery.states import Models, Stack, State, as_stack, compute_dtype, stack_size
from surgery.threads import in_threads
from surgery.transfer import double, upload

_NOTHING = 1e-6  # times the largest norm; a bias that has hardly left 0 may have less
# All in elements.
_BATCH = 1 << 20  # small tensors are put together up to this size on an accelerator
_LARGE = 1 << 19  # and up to this size on the CPU; larger tensors are searched where they lie
_CHUNK = 1 << 19  # searched and squared at once; a multiple of _ROW; an eighth of it took 1.6 times as long
_ROW = 1024  # squares are summed over a row in the tensor's own precision, and over rows in float64


def percentile_norm(tensor: Tensor, *, q: float = 0.95, stacked: bool = False) -> Tensor:
    """Return the L2 norm of entries with magnitudes up to their q-quantile (W95).

    The quantile is the linearly interpolated one, at position q (n - 1) of the n sorted magnitudes. It is at least the
    entry below that position and less than the next one, so that entry is used as an exact threshold, for any n and
    without rounding. (The paper does not say whether it ranks signed or absolute values; here they are absolute.)

    Args:
        tensor: floating or complex, of any shape. An empty tensor has norm 0.
        q: in [0, 1]; 1 gives the norm of the whole tensor.
        stacked: the tensor is [K, *S], and the K entries have norms of their own.

    Returns:
        A scalar, or [K]; at least float32, summed in float64. On the meta device it has no data.

    Raises:
        SurgeryError: for q out of range, integers, and tensors that hold NaN or infinity.

    >>> percentile_norm(torch.tensor([3.0, -4.0, 100.0]), q=0.5)
    tensor(5.)
    >>> percentile_norm(torch.tensor([[3.0, -4.0], [0.0, 2.0]]), q=1.0, stacked=True)
    tensor([5., 2.])
    """
    check_quantile(q)
    if not isinstance(tensor, Tensor):
        raise SurgeryError(f"a {type(tensor).__name__} has no percentile norm: give one tensor", code="argument")
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise SurgeryError(f"tensors of {tensor.dtype} have no percentile norm: convert to float", code="unsupported")
    if stacked and not tensor.ndim:
        raise SurgeryError("a scalar is not a stack: give a tensor [K, *S] or stacked=False", code="argument")
    norms = joint_norms([[row] for row in (tensor if stacked else tensor[None])], q)[:, 0]
    if bool(norms.isnan().any()):
        bad = f" of models {norms.isnan().nonzero().flatten().tolist()}" if stacked else ""
        raise SurgeryError(f"the tensor{bad} holds NaN or infinity: leave it out", code="values")
    norms = norms.to(tensor.device, norm_dtype(tensor.dtype))
    return norms if stacked else norms[0]


@overload
def match_norms(
    models: Models,
    plans: None = None,
    q: float = 0.95,
    *,
    groups: Sequence[Sequence[str]] | None = None,
    mask: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
) -> tuple[Stack, dict[str, Tensor]]: ...
@overload
def match_norms(
    models: Models, plans: Sequence[Plan], q: float = 0.95, *, groups: Sequence[Sequence[str]] | None = None
) -> tuple[list[State], dict[str, Tensor]]: ...
def match_norms(models, plans=None, q=0.95, *, groups=None, mask=None):
    """Scale models, tensor by tensor, to the mean of their percentile norms.

    Model c is multiplied by alpha_c = mean_k ||Wq_k|| / ||Wq_c|| (Alg. 1, line 18), where Wq holds the entries that
    `percentile_norm` counts. Averaging the result with weights n_c, and with the same mask or plans, is the scalable
    aggregation of lines 19-22; `average(..., factors=norm_factors(...))` does the same without a copy of the models.

    Args:
        models: a stack, tensors [K, *S], or a list of K states or modules.
        plans: where each model lies, all in one full model. None: all models have one architecture.
        q: the quantile, in [0, 1].
        groups: names of tensors (with plans, of the full model's) that have one norm and one factor together, as
            `segments(layers(model))` gives them. Tensors in no group are not scaled, so `[(n,) for n in parameters]`
            leaves norm statistics as they are. By default each floating tensor is a group.
        mask: boolean tensors as `average` takes them. A model's norm is over the elements that it covers; all of its
            elements are scaled. Tensors without a mask are covered entirely. Plans take its place.

    Returns:
        The scaled models, which share no memory with the input, and by name of each scaled tensor its factors [K] (at
        least float32; with plans as `norm_factors` gives them). The models are a stack, or with plans a list of states.
        Integer and boolean tensors are copied. A model with norm 0 (it covers nothing of the group, or only zeros)
        or below a millionth of the largest gets factor 1 and is not counted in the mean; the paper would divide by it.

    Raises:
        SurgeryError: for q out of range, groups that name a tensor twice or an unknown one, masks or plans that do not
            fit, and covered elements that are NaN or infinite; for a tensor that stands for several of the full model,
            as a grafted block's do, if these have different factors.

    >>> scaled, factors = match_norms({"w": torch.tensor([[3.0, 4.0], [6.0, 8.0]])}, q=1.0)
    >>> factors["w"], scaled["w"].norm(dim=1)
    (tensor([1.5000, 0.7500]), tensor([7.5000, 7.5000]))
    >>> from surgery.plan import Source
    >>> plans = [Plan({"w": (Source("w", (((0, n),),)),)}, {"w": (2,)}) for n in (1, 2)]
    >>> scaled, _ = match_norms([{"w": torch.tensor([3.0])}, {"w": torch.tensor([3.0, 4.0])}], plans, q=1.0)
    >>> [state["w"].norm() for state in scaled]
    [tensor(4.), tensor(4.)]
    """
    if plans is not None:
        states, factors = client_states(models, plans), norm_factors(models, plans, q=q, groups=groups, mask=mask)
        return [_scale(k, values, plan, factors) for k, (values, plan) in enumerate(zip(states, plans))], factors
    models = as_stack(models)
    factors = {}
    for name, alpha in norm_factors(models, q=q, groups=groups, mask=mask).items():
        factors[name] = upload(alpha.to(norm_dtype(models[name].dtype)), models[name].device)
    scaled = {}
    for name, tensor in models.items():
        if name in factors:
            scaled[name] = (tensor.detach() * factors[name].view(-1, *[1] * (tensor.ndim - 1))).to(tensor.dtype)
        else:
            scaled[name] = tensor.clone()
    return scaled, factors


def norm_factors(
    models: Models,
    plans: Sequence[Plan] | None = None,
    *,
    q: float = 0.95,
    groups: Sequence[Sequence[str]] | None = None,
    mask: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
    weights: Tensor | Sequence[float] | None = None,
    measure: Literal["norm", "rms"] = "norm",
) -> dict[str, Tensor]:
    """Compute the factors by which `match_norms` scales models.

    `average(models, plans, weights, fallback, factors=norm_factors(models, plans, weights=weights))` is FedFA's
    aggregation (Alg. 1, lines 16-22): of models that grafting makes deeper, too, whose last block is scaled for each
    block that it stands for by itself.

    Args:
        models, q, groups, mask: as for `match_norms`.
        plans: where each model lies, all in one full model. A tensor with several sources, as in a grafted block,
            counts at each of them. A model's norm is over its tensors of a group.
        weights: [K], non-negative: models of weight 0 are ignored, all others count alike. None: all count.
        measure: `norm` is the paper's. `rms` divides it by the square root of the number of entries in it, so that a
            narrow model is not scaled up merely because it has fewer entries.

    Returns:
        [K], float64, on the CPU, by name of the tensors that are in a group, but for integers. A model without weight,
        with nothing of the group or with only zeros (or almost, see `match_norms`) gets factor 1 and is not counted in
        the mean.

    Raises:
        SurgeryError: as `match_norms`; for an unknown measure, and weights that `average` would refuse.

    >>> from surgery.plan import Source
    >>> plans = [Plan({"w": (Source("w", (((0, n),),)),)}, {"w": (2,)}) for n in (1, 2)]
    >>> norm_factors([{"w": torch.tensor([3.0])}, {"w": torch.tensor([3.0, 4.0])}], plans, q=1.0)["w"]
    tensor([1.3333, 0.8000], dtype=torch.float64)
    """
    check_quantile(q)
    if not isinstance(measure, str) or measure not in ("norm", "rms"):
        raise SurgeryError(f"unknown measure {repr(measure)[:40]}: choose norm or rms", code="argument")
    if plans is None:
        groups, pairs = _measure_stack(as_stack(models), q, groups, mask, weights)
    elif mask is not None:
        raise SurgeryError("plans say which elements each model covers: give either plans or a mask", code="argument")
    else:
        groups, pairs = _measure_parts(client_states(models, plans), plans, q, groups, weights)
    norms = pairs[..., 0] if measure == "norm" else pairs[..., 0] / pairs[..., 1].sqrt().clamp(min=1)
    for g in norms.isnan().any(1).nonzero().flatten()[:1].tolist():
        bad = norms[g].isnan().nonzero().flatten().tolist()
        raise SurgeryError(f"{', '.join(groups[g])} of models {bad} hold NaN or inf: leave them out", code="values")
    return {name: row for group, row in zip(groups, matching_factors(norms)) for name in group}


def _measure_stack(
    models: Mapping[str, Tensor],
    q: float,
    groups: Sequence[Sequence[str]] | None,
    mask: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None,
    weights: Tensor | Sequence[float] | None,
) -> tuple[list[tuple[str, ...]], Tensor]:
    """Return the G groups, and norms with entry counts: float64 [G, K, 2] on the CPU."""
    k = stack_size(models)
    row = client_weights(weights, k)
    mask = {} if mask is None else {name: check_mask(name, m, models) for name, m in as_stack(mask).items()}
    floating = {name for name, tensor in models.items() if tensor.is_floating_point() or tensor.is_complex()}
    groups = check_groups(groups, models, floating, "the stack")
    pairs = torch.zeros(len(groups), k, 2, dtype=torch.float64)
    for g, group in enumerate(groups):
        covered = [
            [models[n][c].masked_select(mask[n][c]) if n in mask else models[n][c] for n in group] if row[c] else []
            for c in range(k)
        ]
        pairs[g] = joint_norms(covered, q)
    return groups, pairs


def _measure_parts(
    states: Sequence[Mapping[str, Tensor]],
    plans: Sequence[Plan],
    q: float,
    groups: Sequence[Sequence[str]] | None,
    weights: Tensor | Sequence[float] | None,
) -> tuple[list[tuple[str, ...]], Tensor]:
    """Do what `_measure_stack` does, of models that plans place in one full model."""
    members = client_weights(weights, len(states)).nonzero().flatten().tolist()
    small = [
        # An index matters only if it repeats positions: one of them counts.
        {full: [(n, index if repeats(index) else ()) for n, index in held] for full, held in plan.parts.items()}
        for plan in plans
    ]
    integers = {
        full
        for c, held in enumerate(small)
        for full, held_parts in held.items()
        if not all(states[c][n].is_floating_point() or states[c][n].is_complex() for n, _ in held_parts)
    }
    groups = check_groups(groups, plans[0].shapes, plans[0].shapes.keys() - integers, "the full model")
    # A block that stands for others has the same norm everywhere, so it is computed only once.
    rows: dict[tuple[int, tuple[tuple[str, Index], ...]], int] = {}
    place = torch.zeros(len(groups), len(states), dtype=torch.int64)  # of the norm of each group and model; 0 for none
    for g, group in enumerate(groups):
        for c in members:
            held_parts = (part for name in group for part in small[c].get(name, ()))
            if held := tuple(sorted(held_parts, key=lambda part: (part[0], str(part[1])))):
                place[g, c] = rows.setdefault((c, held), len(rows) + 1)
    jobs = [[ascending(states[c][n].detach(), index)[0] for n, index in held] for c, held in rows]
    return groups, joint_norms([[], *jobs], q)[place]


def _scale(k: int, values: Mapping[str, Tensor], plan: Plan, factors: Mapping[str, Tensor]) -> State:
    """Return model k times its factors, by the full model's names of tensors."""
    scaled = {}
    for name, tensor in values.items():
        by_target = {s.name: factors[s.name][k].item() if s.name in factors else 1.0 for s in plan.entries[name]}
        (factor, target), *others = {factor: target for target, factor in by_target.items()}.items()
        if others:
            raise SurgeryError(
                f"tensor {name!r} of model {k} stands for {target!r} and {others[0][1]!r}, which have other factors: "
                "scale while averaging, average(models, plans, factors=surgery.scale.norm_factors(models, plans), ...)",
                code="ambiguous",
            )
        scaled[name] = tensor.detach().clone() if factor == 1 else tensor.detach() * factor
    return scaled


def matching_factors(norms: Tensor) -> Tensor:
    """Return factors [G, K]: the group's mean norm over each model's; 1 if tiny."""
    counted = norms > _NOTHING * norms.amax(1, keepdim=True)
    mean = torch.where(counted, norms, 0).sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
    return torch.where(counted, mean / norms, 1)


def check_groups(
    groups: Sequence[Sequence[str]] | None, names: Collection[str], floating: Collection[str], whole: str
) -> list[tuple[str, ...]]:
    """Return groups without integer tensors; SurgeryError for unknown or twice named."""
    groups = [(name,) for name in names] if groups is None else check_segments(groups, "groups")
    seen: set[str] = set()
    for name in (name for group in groups for name in group):
        if name not in names:
            raise SurgeryError(f"groups name {name!r}, but {whole} has no such tensor", code="name")
        if name in seen:
            raise SurgeryError(f"tensor {name!r} is in two groups: it can have only one factor", code="argument")
        seen.add(name)
    within = [tuple(name for name in group if name in floating) for group in groups]
    return [group for group in within if group]


def joint_norms(jobs: Sequence[Sequence[Tensor]], q: float) -> Tensor:
    """Return each job's percentile norm over its tensors, and the number of entries.

    [J, 2], float64, on the CPU. (NaN, 0) for a job that holds NaN or infinity, (0, 0) for one without entries or
    without data (meta device). The tensors may be on any devices; each device is waited for once.
    """
    check_quantile(q)
    jobs = [[tensor.detach() for tensor in job] for job in jobs]
    alike: dict[tuple[torch.device, torch.dtype, int], list[int]] = {}
    for j, job in enumerate(jobs):
        size = sum(tensor.numel() for tensor in job)
        if size and not job[0].is_meta:
            alike.setdefault((job[0].device, _common(job), size), []).append(j)
    parts: dict[torch.device, list[list[int]]] = {}  # jobs of equal size are done together, the longest first
    for (device, _, size), members in sorted(alike.items(), key=lambda item: -item[0][2]):
        step = max(1, (_LARGE if device.type == "cpu" else _BATCH) // size)
        parts.setdefault(device, []).extend(members[start : start + step] for start in range(0, len(members), step))

    def measure(part: list[int]) -> Tensor:
        if parts_device.type == "cpu" and sum(tensor.numel() for tensor in jobs[part[0]]) >= _LARGE:
            return _search(jobs[part[0]], q)
        return _lowest(torch.stack([_magnitudes(jobs[j]) for j in part]), q)

    result = torch.zeros(len(jobs), 2, dtype=torch.float64)
    for parts_device, device_parts in parts.items():
        norms = in_threads(measure, device_parts) if parts_device.type == "cpu" else list(map(measure, device_parts))
        result[[j for part in device_parts for j in part]] = torch.cat(norms).cpu().double()
    return result


def norm_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the real dtype that norms of tensors of this dtype have."""
    return torch.float64 if compute_dtype(dtype) in (torch.float64, torch.complex128) else torch.float32


def check_quantile(q: float) -> None:
    """Raise SurgeryError unless q is in [0, 1]."""
    if not isinstance(q, Real) or not 0 <= q <= 1:
        raise SurgeryError(f"q must be a quantile in [0, 1], got {repr(q)[:40]}", code="argument")


def _common(job: Sequence[Tensor]) -> torch.dtype:
    """Return the dtype that a job's magnitudes are compared in."""
    return max((norm_dtype(tensor.dtype) for tensor in job), key=lambda dtype: dtype.itemsize)


def _magnitudes(job: Sequence[Tensor]) -> Tensor:
    """[n], new memory, on the first tensor's device."""
    device, dtype = job[0].device, _common(job)
    return torch.cat([tensor.reshape(-1).abs().to(device, dtype) for tensor in job])


def _rank(n: int, q: float) -> int:
    """Return the position of the threshold among n sorted magnitudes."""
    # A Fraction, because 0.29 * 100 must be 29; in floating point it is a little less.
    return math.floor(Fraction(repr(float(q))) * (n - 1))


def _lowest(magnitudes: Tensor, q: float) -> Tensor:
    """Map [R, n] -> [R, 2] as in `joint_norms`; `magnitudes` may be reordered."""
    rank = _rank(magnitudes.shape[1], q)
    if magnitudes.device.type == "cpu":
        # NumPy's selection is ten times as fast as kthvalue. NaN and infinity end up at the rank or behind it.
        magnitudes.numpy().partition(rank, axis=1)
        edge, rest = magnitudes[:, rank].double(), magnitudes[:, rank:]
        ties = (rest == rest[:, :1]).sum(1)  # the threshold itself, and equal entries behind the rank
        norms, counts = (_norm(magnitudes[:, :rank]).square() + ties * edge.square()).sqrt(), rank + ties
        finite = rest.isfinite().all(1)
    else:
        edge = magnitudes.kthvalue(rank + 1, dim=1, keepdim=True).values
        inside = magnitudes <= edge
        norms, counts, finite = _norm(magnitudes.where(inside, 0)), inside.sum(1), magnitudes.isfinite().all(1)
    return torch.stack([norms.where(finite, torch.nan), counts.where(finite, 0).to(norms.dtype)], 1)


def _search(job: Sequence[Tensor], q: float) -> Tensor:
    """`_lowest` of one large job on the CPU: [1, 2], in one pass, without a copy.

    A sample shows between which two magnitudes the threshold should lie. Entries below these are only counted and
    squared; the few in between are gathered, and the threshold is selected among them. The counts show whether it
    really lies there. If not, or if the sum would lose digits, the job is done like small tensors.
    """
    arrays = [_flat(tensor, _common(job)) for tensor in job]
    n, kind = sum(array.size for array in arrays), arrays[0].dtype
    rank = _rank(n, q)
    stride = 6 * math.ceil(n ** (1 / 3) / 8) - 1  # few to sort, few in between; not divisible by 2 or 3
    sample = np.abs(np.concatenate([array[::stride] for array in arrays]))
    middle, spread = rank / n * sample.size, 3 * math.sqrt(sample.size * q * (1 - q)) + 1
    first, last = math.floor(middle - spread), math.ceil(middle + spread)
    sample.partition(min(last, sample.size - 1))
    sample[:last].partition(max(first, 0))
    low = sample[first] if first >= 0 else kind.type(0)
    high = sample[last] if last < sample.size else kind.type(np.inf)
    limits = np.finfo(kind)
    if not (low == 0 or math.sqrt(limits.tiny) * 1e3 < low < math.sqrt(limits.max) / 1e3) or high == limits.max:
        return _lowest(_magnitudes(job)[None], q)  # squares would overflow or underflow
    high = np.nextafter(high, kind.type(np.inf))  # entries that equal the sampled bound are in between, too
    sizes, flags = np.empty(_CHUNK, kind), np.empty((2, _CHUNK), bool)
    most, rows = np.full(_ROW, low), sizes.reshape(-1, _ROW)
    top, number, squares, between = kind.type(0), 0, [], []
    for part in (array[start : start + _CHUNK] for array in arrays for start in range(0, array.size, _CHUNK)):
        if part.size < _CHUNK:
            sizes.fill(0)
        x, (above, beyond) = sizes[: part.size], flags[:, : part.size]
        np.abs(part, out=x)
        top = np.maximum(top, x.max())
        np.greater_equal(x, low, out=above)
        number += int(np.count_nonzero(above))
        np.greater_equal(x, high, out=beyond)
        between.append(x.compress(np.not_equal(above, beyond, out=beyond)))  # several times as fast as x[mask]
        np.minimum(rows, most, out=rows)
        squares.append(np.matmul(rows[:, None, :], rows[:, :, None]))
    total = float(np.concatenate(squares).sum(dtype=np.float64))
    candidates, place = np.concatenate(between), rank - (n - number)
    if not (np.isfinite(top) and 0 <= place < candidates.size):
        return _lowest(_magnitudes(job)[None], q)
    candidates.partition(place)
    ties = np.count_nonzero(candidates[place:] == candidates[place])
    inside = total - number * float(low) ** 2  # the squares below `low`
    inside += (
        np.einsum("i,i", candidates[:place], candidates[:place], dtype=np.float64)
        + ties * float(candidates[place]) ** 2
    )
    if inside < total / 4:
        return _lowest(_magnitudes(job)[None], q)
    return torch.tensor([[math.sqrt(inside), rank + ties]], dtype=torch.float64)


def _flat(tensor: Tensor, dtype: torch.dtype) -> np.ndarray:
    """Return the entries in memory order; without a copy if dense and of the dtype."""
    dense = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True)).reshape(-1)
    return (dense.abs() if dense.is_complex() or dense.is_neg() else dense).to("cpu", dtype).numpy()


def _norm(rows: Tensor) -> Tensor:
    """Reduce [R, n] -> [R] in float64 if possible, without a copy of the whole."""
    chunks = [torch.linalg.vector_norm(double(chunk), dim=1) for chunk in rows.split(_CHUNK, 1)]
    return torch.linalg.vector_norm(torch.stack(chunks), dim=0)
