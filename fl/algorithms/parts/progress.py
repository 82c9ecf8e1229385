"""Measure how far a client's steps go, as the divisor of its update."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.engine import SGD
from fl.federation import Federation


def check_plain(fed: Federation, method: str) -> None:
    """Raise FLError unless updates are sums of gradients with known weights (SGD)."""
    optimizer = fed.local.optimizer
    if not isinstance(optimizer, SGD) or optimizer.clip or optimizer.nesterov or optimizer.weight_decay:
        raise FLError(
            f"{method} takes a client's update for a sum of gradients, which it is with --optimizer sgd, and without "
            "--clip, --nesterov and --weight-decay: leave them out",
            code="unsupported",
        )


def gradients_of(fed: Federation, steps: Sequence[int]) -> Tensor:
    """Return by how many gradients each client moves in a round: float64 [K].

    That is if all gradients are equal. The result is on the CPU. Without momentum it is the number of its steps. With
    momentum mu a gradient counts in all later steps as well: in all (1 - mu^m) / (1 - mu) for the m-th from the end
    (Wang et al., NeurIPS 2020, section 4: the 1-norm of a_i).
    """
    count, mu = torch.tensor(steps, dtype=torch.float64), fed.local.optimizer.momentum
    return (count - mu * (1 - mu**count) / (1 - mu)) / (1 - mu) if mu else count


def expand_like(values: Tensor, like: Tensor) -> Tensor:
    """Return values [K] as they multiply tensors [K, ...] of the same device.

    >>> import torch
    >>> expand_like(torch.ones(2), torch.zeros(2, 3, 4)).shape
    torch.Size([2, 1, 1])
    """
    return values.to(like.dtype).view(-1, *[1] * (like.ndim - 1))
