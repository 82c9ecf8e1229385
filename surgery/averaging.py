"""Aggregation: weighted, clustered and masked means of models, and means that a few malicious models cannot move far.

Trimmed mean and median: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (ICML
2018), definitions 1 and 2, element by element.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from numbers import Real

import torch
from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.states import (
    Models,
    Stack,
    State,
    as_stack,
    as_state,
    check_same,
    compute_dtype,
    is_pruning_mask,
    stack_size,
)
from surgery.transfer import upload

_log = logging.getLogger(__name__)

_SLAB = 1 << 14  # elements sorted at once on a CPU, within its cache; on a GPU many more, to save launches
Moved = Callable[[torch.device, torch.dtype], Tensor]
"""The shares of those who have a weight, on a device and in a dtype."""


def average(
    models: Models,
    *,
    weights: Tensor | Sequence[float] | Sequence[Sequence[float]] | None = None,
    mask: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
    fallback: Mapping[str, Tensor] | nn.Module | None = None,
) -> State | Stack:
    """The weighted mean over the K models of a stack, element by element.

    Args:
        models: a stack, tensors [K, *S], or a list of K states or modules.
        weights: non-negative, not all zero; they need not sum to one. None gives all models the same weight. Weights
            [K] give a state; weights [C, K] give a stack of C means (clustering: row c has the weights of the members
            of cluster c). A model of weight 0 is ignored, even if it holds NaN; NaN of any other model passes through
            to the mean (`surgery.merging` refuses it). Give weights on the CPU: they are read
            on the host, which would have to wait for an accelerator.
        mask: boolean tensors [K, *S] (or a shape that broadcasts to it), True where model k covers the element. The
            mean of an element is taken over the models that cover it. Tensors without a mask are covered entirely.
            Needs `fallback`. A list of K masks, as `embed` gives them, is stacked.
        fallback: a state (or a stack of C states) with the values for elements that no model with weight covers.

    Returns:
        Tensors [*S], or [C, *S] for two-dimensional weights, of the models' dtype; half precision is accumulated in
        float32. Integer and boolean tensors are never averaged: the result is the maximum over the models with weight.
        Neither are masks of torch.nn.utils.prune (`weight_mask` beside `weight_orig`), which have to be the same.

    Raises:
        SurgeryError: for weights that are negative or of a wrong shape; for weights that sum to zero, or a mask,
            without a fallback; for masks and fallbacks that do not fit; for models that were pruned differently.

    >>> average({"w": torch.tensor([[0.0], [4.0]])}, weights=[3, 1])
    {'w': tensor([1.])}
    >>> average({"w": torch.tensor([[0.0], [4.0]])}, weights=[[1, 1], [0, 2]])["w"].tolist()
    [[2.0], [4.0]]
    """

    def value(_: str, chosen: Tensor, covered: Tensor | None, shares: Moved, keep: Tensor | None) -> Tensor:
        if chosen.is_floating_point() or chosen.is_complex():
            result = _mean(chosen, shares(chosen.device, compute_dtype(chosen.dtype)), covered)
        else:
            result = _maximum(chosen, covered)
        return result if covered is None else torch.where(covered.any(0), result, keep.to(result))

    return _by_rows(value, models, weights, mask, fallback)


def trimmed_mean(
    models: Models,
    *,
    trim: float,
    weights: Tensor | Sequence[float] | Sequence[Sequence[float]] | None = None,
    mask: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
    fallback: Mapping[str, Tensor] | nn.Module | None = None,
) -> State | Stack:
    """The mean over a stack's K models without the share `trim` of the smallest and of the largest values.

    Of the m models that cover an element, floor(trim * m) are left out at each end; at 0.5 that leaves the median: the
    middle value, or the mean of the two in the middle. The others have the same weight, since an attacker may lie about
    its number of samples. NaN counts as infinity, so that it is trimmed as well.

    Args:
        models: a stack, tensors [K, *S], none of them complex; or a list of K states or modules.
        trim: in [0, 0.5]; 0 is the plain mean.
        weights, mask, fallback: as for `average`, but only whether a weight is zero matters: such models are ignored.
            Weights [C, K] give a stack of C results.

    Returns:
        Tensors [*S], or [C, *S], of the models' dtype; half precision is summed in float32. For integer and boolean
        tensors it is the maximum over the models with weight, as in `average`.

    Raises:
        SurgeryError: for a trim out of range, complex tensors, and everything that `average` refuses.

    >>> models = {"w": torch.tensor([[1.0], [2.0], [6.0], [900.0]])}
    >>> trimmed_mean(models, trim=0.25), trimmed_mean(models, trim=0.5, weights=[1, 1, 1, 0])
    ({'w': tensor([4.])}, {'w': tensor([2.])})
    """
    check_trim(trim)

    def value(name: str, chosen: Tensor, covered: Tensor | None, _: Moved, keep: Tensor | None) -> Tensor:
        return middle(name, chosen, covered, trim, keep)

    return _by_rows(value, models, weights, mask, fallback)


def check_trim(trim: float) -> None:
    """SurgeryError unless it is a share that can be left out at each end."""
    if isinstance(trim, bool) or not isinstance(trim, Real) or not 0 <= trim <= 0.5:
        raise SurgeryError(f"trim is the share to leave out at each end, in [0, 0.5] (0.5 is the median), got {trim!r}")


def _by_rows(
    value: Callable[[str, Tensor, Tensor | None, Moved, Tensor | None], Tensor],
    models: Models,
    weights: Tensor | Sequence[float] | Sequence[Sequence[float]] | None,
    mask: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None,
    fallback: Mapping[str, Tensor] | nn.Module | None,
) -> State | Stack:
    """For each row of weights and each tensor `value(name, tensors and masks of members, their shares, fallback)`."""
    models = as_stack(models)
    k = stack_size(models)
    mask = {} if mask is None else {name: checked_mask(name, m, models) for name, m in as_stack(mask).items()}
    if mask and fallback is None:
        raise SurgeryError("a mask may leave elements that nobody covers: give values for them as `fallback`")
    fallback = None if fallback is None else as_state(fallback, "the fallback")
    rows = weight_rows(weights, k, fallback is not None)
    results = []
    for c, row in enumerate(rows if rows.ndim == 2 else rows[None]):
        keep = None if fallback is None else _fallback_row(fallback, models, c, rows.shape[:-1])
        members = row.nonzero().flatten()
        share = row[members] / row.max()
        share = share / share.sum()
        # one transfer for each device and dtype, not for each tensor
        places = cache(lambda device, members=members: upload(members, device))
        shares = cache(lambda device, dtype, share=share: upload(share.to(dtype), device))
        result = {}
        for name, tensor in models.items():
            chosen, covered = tensor, mask.get(name)
            if len(members) < k:
                chosen = tensor.index_select(0, places(tensor.device))
                covered = None if covered is None else covered.index_select(0, places(tensor.device))
            old = None if keep is None else keep[name]
            if not len(members):
                result[name] = old.clone()
            elif is_pruning_mask(name, models):
                result[name] = same_mask(name, chosen, covered, old)
            else:
                result[name] = value(name, chosen, covered, shares, old)
        results.append(result)
    return {name: torch.stack([r[name] for r in results]) for name in models} if rows.ndim == 2 else results[0]


def weight_rows(weights, k: int, has_fallback: bool) -> Tensor:
    """Weights [K] or [C, K] in float64 (exact for sample counts and their ratios) on the CPU."""
    if weights is None:
        return torch.ones(k, dtype=torch.float64)
    try:
        rows = weights.detach().cpu() if isinstance(weights, Tensor) else torch.tensor(weights, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SurgeryError(f"weights must be numbers of shape [{k}] or [C, {k}]: {error}") from None
    if rows.is_complex() or rows.ndim not in (1, 2) or rows.shape[-1] != k or not len(rows):
        raise SurgeryError(f"weights have shape {tuple(rows.shape)}: expected [{k}] or [C, {k}] for {k} models")
    rows = rows.double()
    if not bool((rows >= 0).all() & rows.isfinite().all()):
        raise SurgeryError(f"weights must be finite and not negative, got {rows.tolist()}")
    if not has_fallback and bool((rows.sum(-1) == 0).any()):
        raise SurgeryError("weights sum to zero: give values for that case as `fallback`")
    return rows


def checked_mask(name: str, mask: Tensor, models: Mapping[str, Tensor]) -> Tensor:
    """The mask of one tensor, expanded to its shape."""
    if name not in models:
        raise SurgeryError(f"the mask names {name!r}, but the stack has no such tensor")
    if mask.dtype is not torch.bool:
        raise SurgeryError(f"the mask of {name!r} is {mask.dtype}: masks must be boolean")
    try:
        return mask.to(models[name].device).expand_as(models[name])
    except RuntimeError:
        raise SurgeryError(
            f"the mask of {name!r} has shape {tuple(mask.shape)}, the stack {tuple(models[name].shape)}"
        ) from None


def _fallback_row(fallback: Mapping[str, Tensor], models: Mapping[str, Tensor], c: int, rows: Sequence[int]) -> State:
    """The state that row c of the weights falls back to: the fallback, or its entry c if it is a stack.

    `rows` is () for weights [K], and [C] for weights [C, K].
    """
    single = {name: tensor[0] for name, tensor in models.items()}
    stacked = rows and all(n in fallback and fallback[n].shape == (*rows, *t.shape) for n, t in single.items())
    keep = {name: tensor[c] for name, tensor in fallback.items()} if stacked else dict(fallback)
    check_same(single, keep, "the stack", "the fallback")
    return {name: keep[name].to(tensor) for name, tensor in single.items()}


def _mean(x: Tensor, weights: Tensor, covered: Tensor | None) -> Tensor:
    """The mean over the first axis; NaN where nobody covers. Weights [K] sum to one; it is computed in their dtype."""
    values = x.reshape(x.shape[0], x[0].numel()).to(weights.dtype)
    if covered is None:
        mean = weights @ values
    else:
        inside = covered.reshape(values.shape)
        if not weights.is_complex():
            weights = weights.clamp(min=1e-30)  # a weight that is 0 in float32 still counts more than the fallback
        mean = (weights @ values.masked_fill(~inside, 0)) / (weights @ inside.to(weights.dtype))
    return mean.reshape(x.shape[1:]).to(x.dtype)


def same_mask(name: str, masks: Tensor, covered: Tensor | None, keep: Tensor | None) -> Tensor:
    """Return the mask that all have in [K, *S], or `keep` where nobody covers. Raises SurgeryError where two differ."""
    if covered is None:
        first, equal = masks[0], masks == masks[0]
    else:
        first = torch.where(covered.any(0), masks.gather(0, covered.int().argmax(0)[None])[0], keep.to(masks))
        equal = (masks == first) | ~covered
    if not masks.is_meta and not bool(equal.all()):
        raise differing_masks(name)
    return first.clone()


def differing_masks(name: str) -> SurgeryError:
    """Make the error for models that were pruned differently."""
    module, _, mask = name.rpartition(".")
    owner = f"model.get_submodule({module!r})" if module else "model"
    return SurgeryError(
        f"{name!r} is a mask of torch.nn.utils.prune, and the models have different ones, of which there is no mean: "
        f"make each permanent first, torch.nn.utils.prune.remove({owner}, {mask.removesuffix('_mask')!r})"
    )


def _maximum(x: Tensor, covered: Tensor | None) -> Tensor:
    """The maximum over the first axis, compared as int64."""
    values = x.to(torch.int64)
    if covered is not None:
        values = torch.where(covered, values, torch.iinfo(torch.int64).min)
    return values.amax(0).to(x.dtype)


def middle(name: str, values: Tensor, covered: Tensor | None, trim: float, keep: Tensor | None) -> Tensor:
    """The trimmed mean (for integers: maximum) over the first axis of [K, *S], in slabs; `keep` where nobody covers."""
    if values.is_complex():
        raise SurgeryError(
            f"tensor {name!r} is {values.dtype}: complex numbers cannot be sorted, so they cannot be trimmed"
        )
    k, shape = len(values), values.shape[1:]
    if not k:
        return keep.clone()
    numeric, share = values.is_floating_point(), Fraction(str(trim))  # 0.29 * 100 is less than 29 in binary
    cuts = [min(int(share * m), max(m - 1, 0) // 2) for m in range(k + 1)]  # at each end, of m values
    flat = values.reshape(k, shape.numel())
    inside = None if covered is None else covered.reshape(flat.shape)
    old = None if keep is None else keep.reshape(-1)
    result = flat.new_empty(shape.numel())
    table = None if covered is None else upload(torch.tensor(cuts, dtype=torch.int32), values.device)
    step = _SLAB if values.device.type == "cpu" else _SLAB << 8
    for start in range(0, len(result), step):
        slab = slice(start, start + step)
        x = flat[:, slab].to(compute_dtype(values.dtype) if numeric else torch.int64)
        if inside is None:
            result[slab] = _sorted(x)[cuts[k] : k - cuts[k]].mean(0) if numeric else x.amax(0)
            continue
        here = inside[:, slab]
        m = here.sum(0, dtype=torch.int32)
        if numeric:
            mean = _trimmed(x.masked_fill(~here, torch.inf), m, table[m])
        else:
            mean = x.masked_fill(~here, torch.iinfo(torch.int64).min).amax(0)
        result[slab] = torch.where(m > 0, mean, old[slab].to(mean))
    return result.view(shape)


def _trimmed(x: Tensor, m: Tensor, cut: Tensor) -> Tensor:
    """The mean of entries cut, ..., m - cut - 1 of each sorted column of [K, n]."""
    position = torch.arange(len(x), dtype=torch.int32, device=x.device)[:, None]
    counted = (position >= cut) & (position < m - cut)
    return _sorted(x).masked_fill(~counted, 0).sum(0) / (m - 2 * cut)


def _sorted(x: Tensor) -> Tensor:
    """Each column of [K, n] ascending, NaN as infinity; ten times as fast as torch.sort for the K of a round."""
    rows = list(x.nan_to_num(torch.inf, torch.inf, -torch.inf))
    for a, b in _comparators(len(x)):
        rows[a], rows[b] = torch.minimum(rows[a], rows[b]), torch.maximum(rows[a], rows[b])
    return torch.stack(rows)


@cache
def _comparators(k: int) -> list[tuple[int, int]]:
    """Pairs that sort k values if each is put in order in turn: Batcher's odd-even merge sort (AFIPS 1968)."""
    pairs, length = [], 1
    while length < k:  # sorted stretches of this length are merged by pairs
        gap = length
        while gap:
            for low in range(gap % length, k - gap):
                if (low - gap % length) // gap % 2 == 0 and low // (2 * length) == (low + gap) // (2 * length):
                    pairs.append((low, low + gap))
            gap //= 2
        length *= 2
    return pairs
