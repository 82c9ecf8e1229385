"""Tensors as bytes, one after another in one buffer, so that they travel together."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Kind: TypeAlias = tuple[torch.dtype, Sequence[int]]
"""Dtype and shape of a tensor."""

ALIGNED = 16
"""Bytes: where a tensor of any dtype may begin."""


def places(kinds: Iterable[Kind]) -> tuple[list[int], int]:
    """Where each tensor begins in a buffer of bytes, and the buffer's length.

    >>> places([(torch.float32, [5]), (torch.int64, [])])
    ([0, 32], 48)
    """
    starts, at = [], 0
    for dtype, shape in kinds:
        starts.append(at)
        at += -(-math.prod(shape) * dtype.itemsize // ALIGNED) * ALIGNED
    return starts, at


def packed(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """A buffer on the device with the bytes of these tensors.

    >>> packed([torch.zeros(3), torch.ones(2)], torch.device("cpu")).shape
    torch.Size([32])
    """
    tensors = list(tensors)
    starts, length = places((tensor.dtype, tensor.shape) for tensor in tensors)
    buffer = torch.zeros(length, dtype=torch.uint8, device=device)
    for tensor, start in zip(tensors, starts):
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        buffer[start : start + len(flat)] = flat
    return buffer


def unpacked(buffer: Tensor, kinds: Iterable[Kind]) -> list[Tensor]:
    """The tensors of these kinds in a buffer, as views.

    >>> unpacked(packed([torch.tensor([1.0, 2.0])], torch.device("cpu")), [(torch.float32, [2])])
    [tensor([1., 2.])]
    """
    kinds = list(kinds)
    return [
        buffer[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
        for start, (dtype, shape) in zip(places(kinds)[0], kinds)
    ]


def said(tensor: Tensor) -> list[Any]:
    """The kind of a tensor in words that JSON has; `heard` reads them."""
    return [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def heard(dtype: str, shape: Sequence[int]) -> Kind:
    """The kind that another rank has said.

    >>> heard(*said(torch.zeros(2)))
    (torch.float32, [2])
    """
    return getattr(torch, dtype), shape
