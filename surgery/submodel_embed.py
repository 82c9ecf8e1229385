"""A small model's tensors written to their places in the full one's."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.states import Stack, State
from surgery.submodel_index import Entries, Index, Shapes, ascending, grid, pieces, scattered


def embedded(
    entries: Entries,
    shapes: Shapes,
    dtypes: Mapping[str, torch.dtype],
    small: Mapping[str, Tensor],
    into: Mapping[str, Tensor] | None,
    lead: int,
) -> tuple[State | Stack, dict[str, Tensor]]:
    """What `Submodel.embed` returns, for tensors that fit the plan; stacks of them have a `lead` of 1, states of 0."""
    held: dict[str, list[tuple[str, Index]]] = {}
    for name, sources in entries.items():
        for source in sources:
            held.setdefault(source.name, []).append((name, source.index))
    absent = _absent(entries, shapes, dtypes, small) if into is None else {}
    values, mask = {}, {}
    for target, shape in shapes.items():
        parts = held.get(target, [])
        if len(parts) == 1 and all(runs is None for runs in parts[0][1]):
            tensor = small[parts[0][0]]
            values[target] = tensor.clone() if into is None else tensor.to(into[target], copy=True)
            mask[target] = torch.ones(shape, dtype=torch.bool, device=tensor.device)
            continue
        like = small[parts[0][0]] if parts else absent.get(target)
        if into is None and (odd := [n for n, _ in parts if small[n].dtype != like.dtype]):
            raise SurgeryError(
                f"{target!r} is made of {parts[0][0]!r} ({like.dtype}) and {odd[0]!r} ({small[odd[0]].dtype}): "
                "give a full state as `into`, whose dtype is taken"
            )
        values[target] = _zeros(like, (*like.shape[:lead], *shape)) if into is None else into[target].clone()
        device = like.device if parts else values[target].device
        mask[target] = torch.zeros(shape, dtype=torch.bool, device=device)
        for name, index in parts:
            tensor, places = ascending(small[name], index, lead)
            if scattered(places):
                values[target][grid(places, values[target], lead)] = tensor.to(values[target])
                mask[target][grid(places, mask[target])] = True
                continue
            for part, piece in pieces(values[target], tensor, places, lead):
                part.copy_(piece)
            for part, _ in pieces(mask[target], mask[target].new_empty(tensor.shape[lead:]), places):
                part.fill_(True)
    return values, mask


def _absent(
    entries: Entries, shapes: Shapes, dtypes: Mapping[str, torch.dtype], small: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """For each tensor that the small model has nothing of one with the dtype, device and leading axis for it."""
    namesakes: dict[Any, Tensor] = {}  # by last name, by that and the plan's dtype, and by the latter
    for name, tensor in reversed(list(small.items())):
        dtype, last = dtypes.get(entries[name][0].name), name.rpartition(".")[2]
        namesakes |= {last: tensor, (last, dtype): tensor, dtype: tensor}
    whatever = next(iter(small.values()), torch.empty(0))
    written = {source.name for sources in entries.values() for source in sources}
    result = {}
    for target in shapes.keys() - written:
        last, dtype = target.rpartition(".")[2], dtypes.get(target)
        result[target] = namesakes.get(last, whatever)
        if dtype is not None:
            like = namesakes.get((last, dtype), namesakes.get(dtype))
            result[target] = result[target].to(dtype) if like is None else like
    return result


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    zeros = like.new_zeros(shape)
    if (
        zeros.ndim == like.ndim == 4
        and like.is_contiguous(memory_format=torch.channels_last)
        and like.shape[2:].numel() > 1
    ):
        zeros = zeros.to(memory_format=torch.channels_last)
    return zeros
