"""Means that a few malicious models cannot move far.

Trimmed mean and median: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates" (ICML
2018), definitions 1 and 2, element by element.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import cache
from numbers import Real

import torch
from torch import Tensor, nn

from fl.base.errors import FLError
from surgery import Plan, Stack, State
from surgery.averaging import combine
from surgery.states import Models, compute_dtype
from surgery.transfer import upload

_SLAB = 1 << 14  # elements sorted at once on a CPU, within its cache; on a GPU many more, to save launches


def trimmed_mean(
    models: Models,
    plans: Sequence[Plan] | None = None,
    weights: Tensor | Sequence[float] | Sequence[Sequence[float]] | None = None,
    fallback: Mapping[str, Tensor] | nn.Module | None = None,
    *,
    trim: float,
    mask: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
    factors: Mapping[str, Tensor | Sequence[float]] | None = None,
) -> State | Stack:
    """Average K models without the shares `trim` of the smallest and largest values.

    Of the m models that cover an element, floor(trim * m) are left out at each end; at 0.5 that leaves the median: the
    middle value, or the mean of the two in the middle. The others have the same weight, since an attacker may lie about
    its number of samples. NaN counts as infinity, so that it is trimmed as well. With plans one tensor of the full
    model is held for each model at a time.

    Args:
        models, plans, fallback, mask, factors: as for `surgery.average`; no tensor may be complex.
        weights: as for `surgery.average`, but only whether a weight is zero matters: such models are ignored.
        trim: in [0, 0.5]; 0 is the plain mean.

    Returns:
        What `surgery.average` does; half precision is summed in float32.

    Raises:
        FLError: for a trim out of range, and for complex tensors.
        SurgeryError: for everything that `surgery.average` refuses.

    >>> models = {"w": torch.tensor([[1.0], [2.0], [6.0], [900.0]])}
    >>> trimmed_mean(models, trim=0.25), trimmed_mean(models, trim=0.5, weights=[1, 1, 1, 0])
    ({'w': tensor([4.])}, {'w': tensor([2.])})
    """
    if isinstance(trim, bool) or not isinstance(trim, Real) or not 0 <= trim <= 0.5:
        raise FLError(f"trim is the share to leave out at each end, in [0, 0.5] (0.5 is the median), got {trim!r}")

    def reduce(name: str, values: Tensor, covered: Tensor | None, old: Tensor | None) -> Tensor:
        if values.is_complex():
            raise FLError(
                f"tensor {name!r} is {values.dtype}: complex numbers cannot be sorted, so they cannot be trimmed",
                code="unsupported",
            )
        return _middle(values, covered, old, trim)

    return combine(models, plans, weights, fallback, mask=mask, factors=factors, reduce=reduce)


def _middle(values: Tensor, covered: Tensor | None, old: Tensor | None, trim: float) -> Tensor:
    """Return the trimmed mean of [K, *S], in slabs; `old` where no model covers."""
    k, shape, share = len(values), values.shape[1:], Fraction(str(trim))  # 0.29 * 100 is less than 29 in binary
    cuts = [min(int(share * m), max(m - 1, 0) // 2) for m in range(k + 1)]  # at each end, of m values
    flat, result = values.reshape(k, shape.numel()), values.new_empty(shape.numel())
    inside = None if covered is None else covered.reshape(flat.shape)
    fallback = None if old is None else old.reshape(-1)
    table = None if covered is None else upload(torch.tensor(cuts, dtype=torch.int32), values.device)
    step = _SLAB if values.device.type == "cpu" else _SLAB << 8
    for start in range(0, len(result), step):
        slab = slice(start, start + step)
        x = flat[:, slab].to(compute_dtype(values.dtype))
        if inside is None:
            result[slab] = _sort(x)[cuts[k] : k - cuts[k]].mean(0)
            continue
        covers = inside[:, slab]
        m = covers.sum(0, dtype=torch.int32)
        mean = _trim(x.masked_fill(~covers, torch.inf), m, table[m])
        result[slab] = torch.where(m > 0, mean, fallback[slab].to(mean))
    return result.view(shape)


def _trim(x: Tensor, m: Tensor, cut: Tensor) -> Tensor:
    """Return the mean of entries cut ... m - cut - 1 of sorted columns of [K, n]."""
    position = torch.arange(len(x), dtype=torch.int32, device=x.device)[:, None]
    counted = (position >= cut) & (position < m - cut)
    return _sort(x).masked_fill(~counted, 0).sum(0) / (m - 2 * cut)


def _sort(x: Tensor) -> Tensor:
    """Return each column of [K, n] ascending, NaN as infinity.

    Ten times as fast as torch.sort for the K of a round.
    """
    rows = list(x.nan_to_num(torch.inf, torch.inf, -torch.inf))
    for a, b in _comparators(len(x)):
        rows[a], rows[b] = torch.minimum(rows[a], rows[b]), torch.maximum(rows[a], rows[b])
    return torch.stack(rows)


@cache
def _comparators(k: int) -> list[tuple[int, int]]:
    """Return pairs that sort k values if each is put in order in turn.

    This is Batcher's odd-even merge sort (AFIPS 1968).
    """
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
