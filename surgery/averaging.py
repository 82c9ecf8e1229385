"""Aggregation: weighted, clustered and masked means of models."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.states import Models, Stack, State, as_stack, as_state, check_same, compute_dtype, stack_size
from surgery.transfer import upload


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
            to the mean (`surgery.merge` refuses it). Give weights on the CPU: they are read
            on the host, which would have to wait for an accelerator.
        mask: boolean tensors [K, *S] (or a shape that broadcasts to it), True where model k covers the element. The
            mean of an element is taken over the models that cover it. Tensors without a mask are covered entirely.
            Needs `fallback`. A list of K masks, as `embed` gives them, is stacked.
        fallback: a state (or a stack of C states) with the values for elements that no model with weight covers.

    Returns:
        Tensors [*S], or [C, *S] for two-dimensional weights, of the models' dtype; half precision is accumulated in
        float32. Integer and boolean tensors are never averaged: the result is the maximum over the models with weight.

    Raises:
        SurgeryError: for weights that are negative or of a wrong shape; for weights that sum to zero, or a mask,
            without a fallback; for masks and fallbacks that do not fit.

    >>> average({"w": torch.tensor([[0.0], [4.0]])}, weights=[3, 1])
    {'w': tensor([1.])}
    >>> average({"w": torch.tensor([[0.0], [4.0]])}, weights=[[1, 1], [0, 2]])["w"].tolist()
    [[2.0], [4.0]]
    """
    models, mask, fallback = checked_models(models, mask, fallback)
    k = stack_size(models)
    rows = weight_rows(weights, k, fallback is not None)
    clustered = rows.ndim == 2
    result = {name: [] for name in models}
    for c, row in enumerate(rows if clustered else rows[None]):
        keep = None if fallback is None else fallback_row(fallback, models, c, rows.shape[:-1])
        members = row.nonzero().flatten()
        share = row[members] / row.max() if len(members) else row[members]
        share = share / share.sum()
        moved: dict[object, Tensor] = {}  # one transfer for each device and dtype, not for each tensor
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


def checked_models(
    models: Models,
    mask: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None,
    fallback: Mapping[str, Tensor] | nn.Module | None,
) -> tuple[Mapping[str, Tensor], dict[str, Tensor], Mapping[str, Tensor] | None]:
    """The stack, its masks [K, *S], and the fallback; SurgeryError if they do not fit."""
    models = as_stack(models)
    stack_size(models)
    mask = {} if mask is None else {name: checked_mask(name, m, models) for name, m in as_stack(mask).items()}
    if mask and fallback is None:
        raise SurgeryError("a mask may leave elements that nobody covers: give values for them as `fallback`")
    return models, mask, None if fallback is None else as_state(fallback, "the fallback")


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


def fallback_row(fallback: Mapping[str, Tensor], models: Mapping[str, Tensor], c: int, rows: Sequence[int]) -> State:
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


def _maximum(x: Tensor, covered: Tensor | None) -> Tensor:
    """The maximum over the first axis, compared as int64."""
    values = x.to(torch.int64)
    if covered is not None:
        values = torch.where(covered, values, torch.iinfo(torch.int64).min)
    return values.amax(0).to(x.dtype)
