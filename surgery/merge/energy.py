"""SCE: select, calculate, erase."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.lazy import LazyState, Reader, spans
from surgery.merge.group import Group, merged
from surgery.merge.ranks import of_rank
from surgery.merge.settings import ByName, within
from surgery.states import Models, State


def sce(models: Models, *, base: Mapping[str, Tensor] | nn.Module, select: ByName = 1.0) -> State | LazyState:
    """Task vectors weighted by their energy, where models differ most (Wan et al., "FuseChat", 2024, section 3.3).

    Select: of each tensor the share `select` of the elements with the largest variance over the models, counted among
    those whose variance is not 0. Calculate: model k's weight is the mean of its squared selected elements, divided by
    the sum over models. Erase: elements whose sign is not that of the sum over models are left out, and the weights of
    the others are divided by their sum.

    Args:
        models: a stack, or a list of states or modules.
        base: the model that they were fine-tuned from.
        select: in (0, 1], or by patterns of tensor names (1 where none matches). 1 keeps all elements.

    >>> sce([{"w": torch.tensor([2.0, 1.0])}, {"w": torch.tensor([-1.0, 1.0])}], base={"w": torch.zeros(2)})
    {'w': tensor([2., 1.])}
    """
    if base is None:
        raise SurgeryError("task vectors are differences from a base: give the model that was fine-tuned as base=...")
    settings = {"select": within("select", select, 0, 1, open_low=True)}
    return merged(_sce, models, base=base, settings=settings, defaults={"select": 1.0})


def _sce(group: Group, select: float) -> Reader:
    k = len(group.tensors)

    def deltas(start: int, stop: int) -> Tensor:
        return torch.stack([group.delta(i, start, stop) for i in range(k)])

    def variances() -> Iterator[Tensor]:
        for start, stop in spans(group.size):
            yield deltas(start, stop).var(0, correction=0)

    limit = torch.zeros(())
    if select < 1:
        differ = sum(int(slab.count_nonzero()) for slab in variances())
        kept = int(select * differ)
        if not kept:
            return lambda start, stop: group.origin(start, stop)
        limit = of_rank(variances, group.size, group.size - kept)

    def selected(start: int, stop: int) -> Tensor:
        own = deltas(start, stop)
        return own if select == 1 else own * (own.var(0, correction=0) >= limit)

    energy = sum(selected(start, stop).double().square().sum(1) for start, stop in spans(group.size))
    shares = (energy / energy.sum()).tolist() if group.size and bool(energy.sum() > 0) else [1 / k] * k

    def read(start: int, stop: int) -> Tensor:
        own = selected(start, stop)
        sign = own.sum(0).sign()
        return _weighted(own, shares, sign).add_(group.origin(start, stop))

    return read


def _weighted(own: Tensor, shares: list[float], sign: Tensor) -> Tensor:
    agrees = own * sign > 0
    weights = torch.tensor(shares, dtype=own.dtype, device=own.device)[:, None] * agrees
    total = weights.sum(0)
    return (own * weights).sum(0) / total.masked_fill(total == 0, 1)
