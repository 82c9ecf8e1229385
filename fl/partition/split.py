"""What a client trains, validates and tests on."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl.errors import FLError


class Split(NamedTuple):
    """The samples of one client, as indices into the data set's training part."""

    train: Tensor
    valid: Tensor
    test: Tensor


def hold_out(parts: list[Tensor], valid: float, test: float, rng: np.random.Generator) -> list[Split]:
    """Split each client's samples at random into train, validation and test by shares (0 leaves a part empty).

    A part whose share is above 0 gets at least one sample, and so does training.

    >>> split = hold_out([torch.arange(10)], valid=0.1, test=0.2, rng=np.random.default_rng(0))[0]
    >>> [len(part) for part in split]
    [7, 1, 2]
    """
    if not (valid >= 0 and test >= 0 and valid + test < 1):
        raise FLError(f"--local-valid {valid} and --local-test {test} are shares whose sum must stay below 1")
    splits = []
    for client, part in enumerate(parts):
        n = len(part)
        v, t = (max(1, round(share * n)) if share else 0 for share in (valid, test))
        if v + t >= n and n:
            raise FLError(f"client {client} has {n} samples, too few to split off validation and test data")
        order = part[torch.from_numpy(rng.permutation(n))] if v + t else part
        pieces = order.split([n - v - t, v, t])
        splits.append(Split(*(piece.sort().values for piece in pieces)))
    return splits
