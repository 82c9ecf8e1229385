"""Regression mean: linear layers whose outputs are closest to those of all models, each on its own inputs."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.lazy import LazyState, Reader
from surgery.merge.combine import combination
from surgery.merge.group import Group, merged
from surgery.merge.settings import ByName, Weights, within
from surgery.states import Models, State


def regmean(
    models: Models, *, grams: Sequence[Mapping[str, Tensor]], weights: Weights = None, alpha: ByName = 0.9
) -> State | LazyState:
    """Weights of linear layers by least squares, all other tensors by the weighted mean.

    Jin et al., "Dataless knowledge fusion by merging weights of language models" (ICLR 2023), equation 2:
    W = (sum G_k)^-1 sum G_k W_k with the inner products G_k = X_k^T X_k of a layer's inputs, whose elements off the
    diagonal are multiplied by `alpha`. An input that is 0 in all models has the weighted mean of the models.

    Args:
        models: a stack, or a list of states or modules.
        grams: for each model the inner products [I, I] by the name of the layer's weight [O, I] (or [O, c, h, w] with
            c * h * w = I); `input_grams` computes them.
        weights: of the models; they multiply the inner products.
        alpha: in [0, 1], or by patterns of tensor names; below 1 the sum can be inverted.

    Raises:
        SurgeryError: for inner products that do not fit, hold NaN or infinity, or whose sum cannot be inverted.

    >>> models = [{"w": torch.tensor([[1.0, 1.0]])}, {"w": torch.tensor([[5.0, 5.0]])}]
    >>> grams = [{"w": torch.tensor([3.0, 0.0]).diag()}, {"w": torch.tensor([1.0, 0.0]).diag()}]
    >>> regmean(models, grams=grams)
    {'w': tensor([[2., 3.]])}
    """
    if not isinstance(grams, list | tuple) or not all(isinstance(own, Mapping) for own in grams):
        raise SurgeryError(
            "grams is a list with the inner products of each model's inputs, [I, I] by name of the weight"
        )
    names = {name for own in grams for name in own}
    for name in names:
        if lacking := [k for k, own in enumerate(grams) if name not in own]:
            raise SurgeryError(f"model {lacking[0]} has no inner products of the inputs of {name!r}, which others have")

    def own(name: str, places: list[int]) -> list[Tensor] | None:
        if places[-1] >= len(grams):
            raise SurgeryError(f"{len(grams)} models have inner products of inputs, and model {places[-1]} has none")
        return [grams[k][name] for k in places] if name in names else None

    settings = {"alpha": within("alpha", alpha, 0, 1)}
    result = merged(
        _regmean, models, weights=weights, settings=settings, defaults={"alpha": 0.9}, own={"products": own}
    )
    if unknown := names - set(result):
        raise SurgeryError(f"there are inner products for {min(unknown)!r}, but the models have no such tensor")
    return result


def _regmean(group: Group, alpha: float, products: list[Tensor] | None) -> Reader:
    shares = group.shares()
    if products is None or len(shares) == 1:
        return combination(group, shares)
    out = group.tensors[0].shape[0]
    inputs = group.size // out if out else 0
    for k, one in zip(group.places, products):
        if tuple(one.shape) != (inputs, inputs):
            raise SurgeryError(
                f"the inner products for {group.name!r} have shape {tuple(one.shape)} in model {k}: its inputs need "
                f"{(inputs, inputs)}"
            )
        if not bool(one.isfinite().all()):
            raise SurgeryError(f"the inner products for {group.name!r} hold NaN or infinity in model {k}")
    left = torch.zeros(inputs, inputs, dtype=torch.float64)
    right = torch.zeros(inputs, out, dtype=torch.float64)
    dead = sum(one.diagonal().abs() for one in products) == 0
    for i, (share, one) in enumerate(zip(shares, products)):
        one = one.double().cpu()
        one = share * (alpha * one + (1 - alpha) * one.diagonal().diag() + dead.double().cpu().diag())
        left += one
        right += one @ group.value(i, 0, group.size).double().cpu().view(out, inputs).T
    try:
        merged_weight = torch.linalg.solve(left, right).T
    except RuntimeError:  # torch.linalg.LinAlgError is one
        raise SurgeryError(
            f"the inner products of the inputs of {group.name!r} cannot be inverted: give alpha below 1, or more inputs"
        ) from None
    flat = merged_weight.reshape(-1).to(group.dtype).to(group.tensors[0].device)
    return lambda start, stop: flat[start:stop]
