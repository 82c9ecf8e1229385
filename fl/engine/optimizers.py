"""Stochastic gradient descent, in place and fused over all tensors, for one client or a stack of clients alike."""

from typing import NamedTuple

import torch
from torch import Tensor


class SGD(NamedTuple):
    """The settings of torch.optim.SGD, with a fresh momentum buffer every round, and of gradient clipping.

    Attributes:
        clip: the largest norm that the gradient of one client's step may have (torch.nn.utils.clip_grad_norm_ over all
            of its parameters); 0 leaves it as it is.
    """

    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False
    clip: float = 0.0

    def step(self, params: list[Tensor], momentum: list[Tensor], gradients: list[Tensor | None], lead: int = 0) -> None:
        """One step; momentum starts at zero.

        Args:
            params, momentum, gradients: of one client, or with `lead=1` stacks [K, ...] of several. A parameter
                without gradient (the model did not use it) is left alone, as torch.optim does.
        """
        if any(g is None for g in gradients):
            used = [row for row in zip(params, momentum, gradients) if row[2] is not None]
            params, momentum, gradients = map(list, zip(*used))
        if self.clip:
            gradients = clipped(gradients, self.clip, lead)
        if self.weight_decay:
            gradients = torch._foreach_add(gradients, params, alpha=self.weight_decay)
        if self.momentum:
            torch._foreach_mul_(momentum, self.momentum)
            torch._foreach_add_(momentum, gradients)
            ahead = torch._foreach_add(gradients, momentum, alpha=self.momentum) if self.nesterov else momentum
            gradients = ahead
        torch._foreach_add_(params, gradients, alpha=-self.lr)


def clipped(gradients: list[Tensor], bound: float, lead: int) -> list[Tensor]:
    """The gradients, scaled down for each client whose norm over all of them is above `bound`.

    >>> torch.cat(clipped([torch.tensor([[3.0], [0.3]]), torch.tensor([[4.0], [0.4]])], 1.0, lead=1), 1)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    squares = [g.reshape(*g.shape[:lead], -1).square().sum(-1) for g in gradients]
    scale = (bound / (torch.stack(squares).sum(0).sqrt() + 1e-6)).clamp(max=1)
    return [g * scale.view((*scale.shape, *[1] * (g.ndim - lead))) for g in gradients]
