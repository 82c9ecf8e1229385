"""The one aggregation: weighted, clustered, masked means of models."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.state import Stack, State, check_same, compute_dtype, count
from surgery.transfer import upload


def average(
    models: Mapping[str, Tensor],
    weights: Tensor | Sequence[float] | Sequence[Sequence[float]] | None = None,
    mask: Mapping[str, Tensor] | None = None,
    fallback: Mapping[str, Tensor] | None = None,
) -> State | Stack:
    """The weighted mean over the K models of a stack, element by element. The one aggregation.

    Args:
        models: a stack, tensors [K, *S].
        weights: non-negative, not all zero, need not sum to one. None weighs all alike. Shape [K] gives a
            state; shape [C, K] gives a stack of C means, which is clustering: row c weighs the members of
            cluster c. A model of weight 0 takes no part at all, whatever it holds. Give them on the CPU: they
            are read on the host, which waits for an accelerator that they live on.
        mask: boolean tensors [K, *S] (or a shape that broadcasts to it), True where model k covers the
            element. Names left out are covered entirely. The mean of an element runs over the models
            that cover it. Needs `fallback`.
        fallback: a state (or a stack of C of them) that keeps its value where no model has weight.

    Returns:
        Tensors [*S], or [C, *S] for two-dimensional weights, of the models' dtype; half precision is accumulated in
        float32. Integer and boolean tensors are never averaged: the maximum over the models with weight is carried.

    Raises:
        SurgeryError: for weights of a wrong shape, negative ones, weights that sum to zero or a mask
            without fallback, and masks and fallbacks that do not fit.

    >>> average({"w": torch.tensor([[0.0], [4.0]])}, weights=[3, 1])
    {'w': tensor([1.])}
    >>> average({"w": torch.tensor([[0.0], [4.0]])}, weights=[[1, 1], [0, 2]])["w"].tolist()
    [[2.0], [4.0]]
    """
    k = count(models)
    rows = weight_rows(weights, k, fallback is not None)
    mask = {} if mask is None else {name: checked_mask(name, m, models) for name, m in mask.items()}
    if mask and fallback is None:
        raise SurgeryError("a mask can leave elements that nobody covers: give the values to keep as `fallback`")
    clustered = rows.ndim == 2
    result = {name: [] for name in models}
    for c, row in enumerate(rows if clustered else rows[None]):
        keep = None if fallback is None else _fallback_row(fallback, models, c, len(rows) if clustered else None)
        members = row.nonzero().flatten()
        share = row[members] / row.max() if len(members) else row[members]
        share = share / share.sum()
        moved: dict[object, Tensor] = {}  # one transfer a device and dtype, not one a tensor
        for name, tensor in models.items():
            if not len(members):
                result[name].append(keep[name].clone())
                continue
            chosen, covered = tensor, mask.get(name)
            if len(members) < k:
                if tensor.device not in moved:
                    moved[tensor.device] = upload(members, tensor.device)
                chosen = tensor.index_select(0, moved[tensor.device])
                covered = None if covered is None else covered.index_select(0, moved[tensor.device])
            if tensor.is_floating_point() or tensor.is_complex():
                key = tensor.device, compute_dtype(tensor.dtype)
                if key not in moved:
                    moved[key] = upload(share.to(key[1]), key[0])
                value = _mean(chosen, moved[key], covered)
            else:
                value = _maximum(chosen, covered)
            if covered is not None:
                value = torch.where(covered.any(0), value, keep[name].to(value))
            result[name].append(value)
    return {name: torch.stack(values) if clustered else values[0] for name, values in result.items()}


def weight_rows(weights, k: int, has_fallback: bool) -> Tensor:
    """Weights on the CPU in float64, in which sample counts and their ratios stay exact: [K] or [C, K]."""
    if weights is None:
        return torch.ones(k, dtype=torch.float64)
    try:
        rows = weights.detach().cpu() if isinstance(weights, Tensor) else torch.tensor(weights, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise SurgeryError(f"weights are no numbers of shape [{k}] or [C, {k}]: {error}") from None
    if rows.is_complex() or rows.ndim not in (1, 2) or rows.shape[-1] != k or not len(rows):
        raise SurgeryError(f"weights have shape {tuple(rows.shape)}: expected [{k}] or [C, {k}] for {k} models")
    rows = rows.double()
    if not bool((rows >= 0).all() & rows.isfinite().all()):
        raise SurgeryError(f"weights must be finite and not negative, got {rows.tolist()}")
    if not has_fallback and bool((rows.sum(-1) == 0).any()):
        raise SurgeryError("weights sum to zero: give values to keep for that case as `fallback`")
    return rows


def checked_mask(name: str, mask: Tensor, models: Mapping[str, Tensor]) -> Tensor:
    """The mask of one tensor, expanded to its shape."""
    if name not in models:
        raise SurgeryError(f"the mask names {name!r}, which the stack does not have")
    if mask.dtype is not torch.bool:
        raise SurgeryError(f"the mask of {name!r} is {mask.dtype}: masks are boolean")
    try:
        return mask.to(models[name].device).expand_as(models[name])
    except RuntimeError:
        raise SurgeryError(
            f"the mask of {name!r} has shape {tuple(mask.shape)}, the stack {tuple(models[name].shape)}"
        ) from None


def _fallback_row(fallback: Mapping[str, Tensor], models: Mapping[str, Tensor], c: int, rows: int | None) -> State:
    """The state that row c falls back to."""
    single = {name: tensor[0] for name, tensor in models.items()}
    stacked = rows is not None and all(
        name in fallback and fallback[name].shape == (rows, *tensor.shape) for name, tensor in single.items()
    )
    keep = {name: tensor[c] for name, tensor in fallback.items()} if stacked else dict(fallback)
    check_same(single, keep, "the stack", "the fallback")
    return {name: keep[name].to(tensor) for name, tensor in single.items()}


def _mean(x: Tensor, weights: Tensor, covered: Tensor | None) -> Tensor:
    """Over the first axis; weights [K] sum to one and have the dtype to compute in. NaN where nobody covers."""
    values = x.reshape(x.shape[0], x[0].numel()).to(weights.dtype)
    if covered is None:
        mean = weights @ values
    else:
        inside = covered.reshape(values.shape)
        if not weights.is_complex():
            weights = weights.clamp(min=1e-30)  # a weight that vanished in float32 still beats the fallback
        mean = (weights @ values.masked_fill(~inside, 0)) / (weights @ inside.to(weights.dtype))
    return mean.reshape(x.shape[1:]).to(x.dtype)


def _maximum(x: Tensor, covered: Tensor | None) -> Tensor:
    """Over the first axis; integers of every width compare as int64."""
    values = x.to(torch.int64)
    if covered is not None:
        values = torch.where(covered, values, torch.iinfo(torch.int64).min)
    return values.amax(0).to(x.dtype)
