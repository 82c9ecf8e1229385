"""Means that a few malicious models cannot move far: trimmed mean and median, element by element.

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (ICML 2018), definitions 1 and 2.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor, nn

from surgery.averaging import checked_models, fallback_row, weight_rows
from surgery.errors import SurgeryError
from surgery.states import Models, Stack, State, as_state, compute_dtype, stack_size
from surgery.submodel import Submodel
from surgery.submodel_checks import check_clients, client_scales, client_states, client_weights
from surgery.submodel_index import ascending, pieces
from surgery.transfer import upload

_SLAB = 1 << 14  # elements sorted at once on a CPU, within its cache; on a GPU many more, to save launches


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
    models, mask, fallback = checked_models(models, mask, fallback)
    k = stack_size(models)
    cuts = _cuts(trim, k)
    rows = weight_rows(weights, k, fallback is not None)
    results = []
    for c, row in enumerate(rows if rows.ndim == 2 else rows[None]):
        keep = None if fallback is None else fallback_row(fallback, models, c, rows.shape[:-1])
        members = row.nonzero().flatten()
        moved = {device: upload(members, device) for device in {tensor.device for tensor in models.values()}}
        result = {}
        for name, tensor in models.items():
            chosen, covered = tensor, mask.get(name)
            if len(members) < k:
                chosen = tensor.index_select(0, moved[tensor.device])
                covered = None if covered is None else covered.index_select(0, moved[tensor.device])
            result[name] = _middle(name, chosen, covered, cuts, None if keep is None else keep[name])
        results.append(result)
    return {name: torch.stack([r[name] for r in results]) for name in models} if rows.ndim == 2 else results[0]


def trimmed_mean_submodels(
    states: Sequence[Mapping[str, Tensor]],
    plans: Sequence[Submodel],
    *,
    trim: float,
    weights: Tensor | Sequence[float] | None = None,
    factors: Mapping[str, Tensor] | None = None,
    fallback: Mapping[str, Tensor],
) -> State:
    """`trimmed_mean`, element by element of the full model, over the clients whose plan covers the element.

    Equal to embedding every state and taking `trimmed_mean`, but only one tensor of the full model is held for each
    client at a time.

    Args:
        states, plans, fallback: as for `average_submodels`.
        trim: in [0, 0.5].
        weights: [K]. A client of weight 0 is ignored; the others have the same weight.
        factors: [K] by name of the full model's tensors: client k's values there are first multiplied by them (FedFA's
            scales). Names left out have factor 1; integer tensors ignore theirs.

    Returns:
        A state of the full model with the fallback's dtypes and devices.

    Raises:
        SurgeryError: for everything that `average_submodels` and `trimmed_mean` refuse.

    >>> from surgery.submodel import Source
    >>> narrow = Submodel({"w": (Source("w", (((0, 1),),)),)}, {"w": (2,)})
    >>> wide = Submodel({"w": (Source("w", (None,)),)}, {"w": (2,)})
    >>> states = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0, 4.0])}, {"w": torch.tensor([9.0, 6.0])}]
    >>> trimmed_mean_submodels(states, [narrow, wide, wide], trim=0.5, fallback={"w": torch.zeros(2)})
    {'w': tensor([2., 5.])}
    """
    states, fallback = client_states(states), as_state(fallback, "the fallback")
    check_clients(states, plans, fallback)
    scales = client_scales(factors, len(states), fallback)
    cuts = _cuts(trim, len(states))
    row = client_weights(weights, len(states))
    parts = {name: {} for name in fallback}  # by client what it has of the tensor
    for k in row.nonzero().flatten().tolist():
        for name, sources in plans[k].entries.items():
            for source in sources:
                parts[source.name].setdefault(k, []).append((states[k][name].detach(), source.index))
    result = {}
    with torch.no_grad():
        for name, keep in fallback.items():
            values = keep.new_zeros(len(parts[name]), *keep.shape)
            covered = torch.zeros_like(values, dtype=torch.bool)
            found = [(i, k, *part) for i, (k, own) in enumerate(parts[name].items()) for part in own]
            for i, k, small, index in found:
                if small.is_floating_point() != keep.is_floating_point():
                    raise SurgeryError(f"tensor {name!r} is {keep.dtype} in the fallback and {small.dtype} in a state")
                if name in scales and keep.is_floating_point():
                    small = small * scales[name][k]
                small, index = ascending(small, index)
                for place, piece in pieces(values[i], small, index):
                    place.copy_(piece)
                for place, _ in pieces(covered[i], small, index):
                    place.fill_(True)
            result[name] = _middle(name, values, covered, cuts, keep)
    return result


def _cuts(trim: float, k: int) -> list[int]:
    """For 0, 1, ..., k models how many are left out at each end."""
    if isinstance(trim, bool) or not isinstance(trim, int | float) or not 0 <= trim <= 0.5:
        raise SurgeryError(f"trim is the share to leave out at each end, in [0, 0.5] (0.5 is the median), got {trim!r}")
    share = Fraction(str(trim))  # 0.29 * 100 is less than 29 in binary
    return [min(int(share * m), max(m - 1, 0) // 2) for m in range(k + 1)]


def _middle(name: str, values: Tensor, covered: Tensor | None, cuts: list[int], keep: Tensor | None) -> Tensor:
    """The trimmed mean (for integers: maximum) over the first axis of [K, *S], in slabs; `keep` where nobody covers."""
    if values.is_complex():
        raise SurgeryError(
            f"tensor {name!r} is {values.dtype}: complex numbers cannot be sorted, so they cannot be trimmed"
        )
    k, shape = len(values), values.shape[1:]
    if not k:
        return keep.clone()
    numeric = values.is_floating_point()
    flat = values.reshape(k, shape.numel())
    inside = None if covered is None else covered.reshape(flat.shape)
    old = None if keep is None else keep.reshape(-1)
    result = flat.new_empty(shape.numel())
    table = None if covered is None else upload(torch.tensor(cuts[: k + 1], dtype=torch.int32), values.device)
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
