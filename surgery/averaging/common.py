"""Shared code for averages: weights, and tensors that have no mean."""

from collections.abc import Callable, Container, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.states import is_pruning_mask

Weights: TypeAlias = Tensor | Sequence[float] | Sequence[Sequence[float]] | None
Reduce: TypeAlias = Callable[[str, Tensor, Tensor | None, Tensor | None], Tensor]
"""Makes one tensor [*S] of a tensor's name, its values [K, *S], a mask of those that count (None: all of them), and
the values [*S] where none does (None only without a mask)."""


def reduce_tensor(
    name: str, names: Container[str], values: Tensor, covered: Tensor | None, old: Tensor | None, reduce: Reduce
) -> Tensor:
    """Return one pruning mask, the maximum of integers, or `reduce` of other values."""
    if is_pruning_mask(name, names):
        return _same_mask(name, values, covered, old)
    if values.is_floating_point() or values.is_complex():
        return reduce(name, values, covered, old)
    largest = values.to(torch.int64)
    if covered is None:
        return largest.amax(0).to(values.dtype)
    largest = largest.masked_fill(~covered, torch.iinfo(torch.int64).min).amax(0).to(values.dtype)
    return torch.where(covered.any(0), largest, old.to(largest))


def weight_rows(weights: Weights, k: int, has_fallback: bool) -> Tensor:
    """Return weights [K] or [C, K] in float64 on the CPU, exact for sample counts."""
    if weights is None:
        return torch.ones(k, dtype=torch.float64)
    try:
        rows = weights.detach().cpu() if isinstance(weights, Tensor) else torch.tensor(weights, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SurgeryError(f"weights must be numbers of shape [{k}] or [C, {k}]: {error}", code="argument") from None
    if rows.is_complex() or rows.ndim not in (1, 2) or rows.shape[-1] != k or not len(rows):
        raise SurgeryError(f"weights have shape {tuple(rows.shape)}: expected [{k}] or [C, {k}]", code="argument")
    rows = rows.double()
    if not bool((rows >= 0).all() & rows.isfinite().all()):
        raise SurgeryError(f"weights must be finite and not negative, got {rows.tolist()}", code="argument")
    if not has_fallback and bool((rows.sum(-1) == 0).any()):
        raise SurgeryError("weights sum to zero: give values for that case as `fallback`", code="argument")
    return rows


def _same_mask(name: str, masks: Tensor, covered: Tensor | None, keep: Tensor | None) -> Tensor:
    """Return the mask that all have in [K, *S], or `keep` where no one covers.

    Raises SurgeryError where two differ.
    """
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
        f"make each permanent first, torch.nn.utils.prune.remove({owner}, {mask.removesuffix('_mask')!r})",
        code="mismatch",
    )
