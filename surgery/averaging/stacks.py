"""Means over a stack: weighted, clustered and masked."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

from surgery.averaging.common import Reduce, Weights, reduce_tensor, weight_rows
from surgery.errors import SurgeryError
from surgery.states import Models, Stack, State, as_stack, as_state, check_same, compute_dtype, stack_size
from surgery.transfer import upload

Moved = Callable[[torch.device, torch.dtype], Tensor]
"""The shares of those who have a weight, on a device and in a dtype."""


def average_stack(
    models: Models,
    weights: Weights,
    fallback: Mapping[str, Tensor] | nn.Module | None,
    mask: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None,
    reduce: Reduce | None,
) -> State | Stack:
    """Average models of one architecture, see `combine`."""
    models = as_stack(models)
    k = stack_size(models)
    mask = {} if mask is None else {name: check_mask(name, m, models) for name, m in as_stack(mask).items()}
    if mask and fallback is None:
        raise SurgeryError("a mask may leave elements uncovered: give their values as `fallback`", code="argument")
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
            else:
                result[name] = reduce_tensor(name, models, chosen, covered, old, reduce or partial(_mean, shares))
        results.append(result)
    return {name: torch.stack([r[name] for r in results]) for name in models} if rows.ndim == 2 else results[0]


def check_mask(name: str, mask: Tensor, models: Mapping[str, Tensor]) -> Tensor:
    """Return the mask of one tensor, expanded to its shape."""
    if name not in models:
        raise SurgeryError(f"the mask names {name!r}, but the stack has no such tensor", code="name")
    if mask.dtype is not torch.bool:
        raise SurgeryError(f"the mask of {name!r} is {mask.dtype}: masks must be boolean", code="argument")
    try:
        return mask.to(models[name].device).expand_as(models[name])
    except RuntimeError:
        raise SurgeryError(
            f"the mask of {name!r} is {tuple(mask.shape)}, the stack {tuple(models[name].shape)}", code="mismatch"
        ) from None


def _fallback_row(fallback: Mapping[str, Tensor], models: Mapping[str, Tensor], c: int, rows: Sequence[int]) -> State:
    """Return what row c of the weights falls back to: the fallback, or its entry c."""
    single = {name: tensor[0] for name, tensor in models.items()}
    stacked = rows and all(n in fallback and fallback[n].shape == (*rows, *t.shape) for n, t in single.items())
    keep = {name: tensor[c] for name, tensor in fallback.items()} if stacked else dict(fallback)
    check_same(single, keep, "the stack", "the fallback")
    return {name: keep[name].to(tensor) for name, tensor in single.items()}


def _mean(shares: Moved, _: str, values: Tensor, covered: Tensor | None, old: Tensor | None) -> Tensor:
    """Return the mean over the first axis in the computing dtype; `old` without cover."""
    weights = shares(values.device, compute_dtype(values.dtype))
    flat = values.reshape(values.shape[0], values[0].numel()).to(weights.dtype)
    if covered is None:
        return (weights @ flat).reshape(values.shape[1:]).to(values.dtype)
    inside = covered.reshape(flat.shape)
    if not weights.is_complex():
        weights = weights.clamp(min=1e-30)  # a weight that is 0 in float32 still counts more than the fallback
    mean = (weights @ flat.masked_fill(~inside, 0)) / (weights @ inside.to(weights.dtype))
    mean = mean.reshape(values.shape[1:]).to(values.dtype)
    return torch.where(covered.any(0), mean, old.to(mean))
