"""Random numbers that belong to elements: which stretch is asked for, and in which order, does not change them."""

import hashlib

import torch
from torch import Tensor

_BLOCK = 1 << 16  # elements whose numbers come from one generator


def uniform(seed: int, name: str, model: int, start: int, stop: int) -> Tensor:
    """Numbers in [0, 1) for elements start, ..., stop - 1 of a tensor of a model: a function of these arguments alone.

    >>> torch.equal(uniform(0, "w", 1, 0, 9)[4:], uniform(0, "w", 1, 4, 9))
    True
    """
    key = int.from_bytes(hashlib.sha256(f"{seed}/{model}/{name}".encode()).digest()[:7], "big")
    first, last = start // _BLOCK, -(-stop // _BLOCK)
    blocks = [torch.rand(_BLOCK, generator=torch.Generator().manual_seed(key + block)) for block in range(first, last)]
    return torch.cat(blocks)[start - first * _BLOCK : stop - first * _BLOCK] if blocks else torch.empty(0)
