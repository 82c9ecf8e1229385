"""Means weighted by how sharply each model's likelihood changes with each parameter."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.lazy import LazyState, Reader, metas, pieces_of
from surgery.merge.combine import combination
from surgery.merge.group import Group, merged
from surgery.merge.settings import Weights
from surgery.states import Models, State


def fisher(models: Models, *, fishers: Sequence[Mapping[str, Tensor]], weights: Weights = None) -> State | LazyState:
    """The mean of models, each element weighted by its Fisher information: sum w_k F_k x_k / sum w_k F_k.

    Matena and Raffel, "Merging models with Fisher-weighted averaging" (NeurIPS 2022), equation 4.

    Args:
        models: a stack, or a list of states or modules.
        fishers: for each model its Fisher information by tensor name, not negative, of the tensors' shapes;
            `fisher_information` computes it. Tensors that none of them names (buffers) have the weighted mean.
        weights: of the models, the paper's lambda.

    Raises:
        SurgeryError: for information of other shapes, negative, NaN or infinite, or of some models only.

    >>> models = [{"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([5.0, 5.0])}]
    >>> fisher(models, fishers=[{"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([1.0, 0.0])}])
    {'w': tensor([2., 3.])}
    """
    if not isinstance(fishers, list | tuple) or not all(isinstance(own, Mapping) for own in fishers):
        raise SurgeryError("fishers is a list with the Fisher information of each model, tensors by name")
    names = {name for own in fishers for name in own}
    for name in names:
        if lacking := [k for k, own in enumerate(fishers) if name not in own]:
            raise SurgeryError(
                f"model {lacking[0]} has no Fisher information of {name!r}, which others have: compute it"
            )

    def own(name: str, places: list[int]) -> list | None:
        if places[-1] >= len(fishers):
            raise SurgeryError(f"{len(fishers)} models have Fisher information, and model {places[-1]} has none")
        return [pieces_of(fishers[k], name) for k in places] if name in names else None

    result = merged(_fisher, models, weights=weights, own={"information": own})
    if unknown := names - set(result):
        raise SurgeryError(f"there is Fisher information of {min(unknown)!r}, but the models have no such tensor")
    for k, shapes in enumerate(map(metas, fishers)):
        for name, tensor in shapes.items():
            there = pieces_of(result, name).shape
            if tuple(tensor.shape) != there:
                raise SurgeryError(
                    f"the Fisher information of {name!r} is {tuple(tensor.shape)} in model {k}: need {there}"
                )
    return result


def _fisher(group: Group, information: list | None) -> Reader:
    shares = group.shares()
    if information is None or len(shares) == 1:
        return combination(group, shares)

    def read(start: int, stop: int) -> Tensor:
        total = below = plain = 0
        for i, (share, known) in enumerate(zip(shares, information)):
            value = group.value(i, start, stop)
            weight = share * known.read(start, stop).to(value)
            if not bool((weight >= 0).all() & weight.isfinite().all()):
                raise SurgeryError(
                    f"the Fisher information of {group.name!r} is negative, NaN or infinite in model {group.places[i]}"
                )
            total, below, plain = total + weight * value, below + weight, plain + share * value
        return torch.where(below > 0, total / below.masked_fill(below == 0, 1), plain)

    return read
