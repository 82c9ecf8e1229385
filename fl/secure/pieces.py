"""A stack of models as bytes, piece by piece, and back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from surgery import Stack
from surgery.recombine import Segment


def to_bytes(models: Stack, pieces: Sequence[Segment]) -> list[list[bytes]]:
    """The K models of a stack, each as the bytes of its pieces, with one transfer from the device for each piece.

    Args:
        pieces: the state names of each, as `surgery.segments` gives them.

    >>> to_bytes({"a": torch.tensor([1, 2]), "b": torch.tensor([[True], [False]])}, [("a",), ("b",)])[1]
    [b'\\x02\\x00\\x00\\x00\\x00\\x00\\x00\\x00', b'\\x00']
    """
    columns = []
    for names in pieces:
        rows = torch.cat([_rows(models[name]) for name in names], 1).cpu().numpy()
        columns.append([row.tobytes() for row in rows])
    return [list(model) for model in zip(*columns)]


def from_bytes(models: Sequence[Sequence[bytes]], pieces: Sequence[Segment], like: Stack) -> Stack:
    """The inverse, bit for bit: a stack of the given models.

    Args:
        like: a stack with the names, shapes (except for the first axis), dtypes and device of the result.
    """
    result = dict.fromkeys(like)
    for number, names in enumerate(pieces):
        widths = [like[name][0].nbytes for name in names]
        data = bytearray(b"".join(model[number] for model in models))
        device = like[names[0]].device
        rows = torch.frombuffer(data, dtype=torch.uint8).to(device) if data else torch.empty(0, dtype=torch.uint8)
        for name, part in zip(names, rows.view(len(models), sum(widths)).split(widths, 1)):
            tensor = like[name]
            flat = part.clone(memory_format=torch.contiguous_format).view(-1)  # its own memory, aligned for any dtype
            result[name] = flat.view(tensor.dtype).view(len(models), *tensor.shape[1:]).to(tensor.device)
    return result


def _rows(tensor: Tensor) -> Tensor:
    """[K, *S] as bytes [K, bytes of S]."""
    return tensor.detach().reshape(-1).view(torch.uint8).view(len(tensor), -1) if tensor.numel() else _none(tensor)


def _none(tensor: Tensor) -> Tensor:
    return torch.empty(len(tensor), 0, dtype=torch.uint8, device=tensor.device)
