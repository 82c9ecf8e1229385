"""The clients' optimizers, and how their learning rate changes in a run.

Steps are fused over all tensors, in place, of one client or a stack of clients alike.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.base.torch_private import foreach_add_, foreach_mul, fused_adam, fused_adamw, fused_sgd

Memory: TypeAlias = dict[str, list[Tensor]]
"""What an optimizer keeps from step to step: by name, a tensor for each parameter."""


class SGD(NamedTuple):
    """Settings of torch.optim.SGD, with fresh momentum every round, and of clipping.

    Attributes:
        clip: the largest norm that the gradient of one client's step may have (torch.nn.utils.clip_grad_norm_ over all
            of its parameters); 0 leaves it as it is.
    """

    lr: float | Tensor = 0.01
    momentum: float = 0.9
    weight_decay: float = 0.0
    nesterov: bool = False
    clip: float = 0.0

    def memory(self, params: Sequence[Tensor]) -> Memory:
        """Return what the optimizer keeps from step to step, as it is before the first."""
        return {"momentum": [torch.zeros_like(p) for p in params]} if self.momentum else {}

    def step(self, params: list[Tensor], memory: Memory, gradients: Sequence[Tensor | None], lead: int = 0) -> None:
        """Make a step in place.

        Args:
            params, memory, gradients: of one client, or with `lead=1` stacks [K, ...] of several clients that have made
                the same number of steps. A parameter without a gradient (the model did not use it) stays as it is, as
                in torch.optim.
        """
        params, memory, gradients = _ready(params, memory, gradients, self.clip, lead)
        fused_sgd(
            params,
            gradients,
            memory.get("momentum", []),
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            dampening=0.0,
            maximize=False,
            is_first_step=False,
        )


class Adam(NamedTuple):
    """Settings of Adam or AdamW, with fresh moments every round (see `SGD`).

    Attributes:
        decoupled: whether weight decay shrinks the weights by lr * weight_decay in each step (AdamW: Loshchilov and
            Hutter, ICLR 2019), in place of being added to the gradient.
    """

    lr: float | Tensor = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 0.0
    decoupled: bool = False

    def memory(self, params: Sequence[Tensor]) -> Memory:
        """See `SGD.memory`."""
        first, second = ([torch.zeros_like(p) for p in params] for _ in range(2))
        return {"first": first, "second": second, "steps": [torch.zeros((), device=p.device) for p in params]}

    def step(self, params: list[Tensor], memory: Memory, gradients: Sequence[Tensor | None], lead: int = 0) -> None:
        """Make a step in place, see `SGD.step`."""
        params, memory, gradients = _ready(params, memory, gradients, self.clip, lead)
        foreach_add_(memory["steps"], 1)
        step = fused_adamw if self.decoupled else fused_adam
        step(
            params,
            gradients,
            memory["first"],
            memory["second"],
            [],
            memory["steps"],
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
        )


Optimizer: TypeAlias = SGD | Adam


def _ready(
    params: list[Tensor], memory: Memory, gradients: Sequence[Tensor | None], clip: float, lead: int
) -> tuple[list[Tensor], Memory, list[Tensor]]:
    """Return parameters with gradients, and the gradients, as a fused kernel needs.

    The gradients are clipped, and laid out in memory like the parameters.
    """
    if any(g is None for g in gradients):
        used = [i for i, g in enumerate(gradients) if g is not None]
        params, gradients = [params[i] for i in used], [gradients[i] for i in used]
        memory = {name: [tensors[i] for i in used] for name, tensors in memory.items()}
    if clip:
        gradients = clip_gradients(gradients, clip, lead)
    # The kernels walk through memory and do not look at strides.
    alike = [
        g if g.stride() == p.stride() else torch.empty_like(p, requires_grad=False).copy_(g)
        for g, p in zip(gradients, params)
    ]
    return params, memory, alike


def clip_gradients(gradients: Sequence[Tensor], bound: float, lead: int) -> list[Tensor]:
    """Return the gradients, scaled down where a client's norm is above `bound`.

    The norm is over all tensors of a client.

    >>> torch.cat(clip_gradients([torch.tensor([[3.0], [0.3]]), torch.tensor([[4.0], [0.4]])], 1.0, lead=1), 1)
    tensor([[0.6000, 0.8000],
            [0.3000, 0.4000]])
    """
    squares = [g.reshape(*g.shape[:lead], -1).sum(-1) for g in foreach_mul(list(gradients), list(gradients))]
    scale = (bound / (torch.stack(squares).sum(0).sqrt() + 1e-6)).clamp(max=1)
    if not lead:
        return list(foreach_mul(list(gradients), scale))
    return [g * scale.view((*scale.shape, *[1] * (g.ndim - lead))).to(g.dtype) for g in gradients]


Schedule: TypeAlias = Callable[[int], float]
"""round (from 1) -> the factor of its learning rate"""

SCHEDULES = {"constant": False, "step": True, "cosine": True, "exponential": False}
"""The names of schedules, and whether they depend on the number of rounds of the whole run."""


def schedule(
    name: str,
    rounds: int,
    factor: float = 0.1,
    at: tuple[float, ...] = (0.5, 0.75),
    decay: float = 0.998,
    warmup: int = 0,
) -> Schedule:
    """Return a schedule by name.

    Args:
        name: `constant`; `step` multiplies by `factor` after each of the shares `at` of all rounds (HeteroFL, NeFL,
            FedFA: 0.1 after half and three quarters); `cosine` falls from 1 in the first round to nearly 0;
            `exponential` multiplies by `decay` after each round.
        rounds: the number of rounds of the whole run.
        warmup: a number of first rounds in which what the schedule says is reached linearly, by the factors 1/(warmup +
            1), 2/(warmup + 1), ...

    Raises:
        FLError: for an unknown name, shares outside of (0, 1), and a warm-up as long as the run.

    >>> [round(schedule("step", 8)(r), 3) for r in (1, 4, 5, 6, 7, 8)]
    [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    >>> [round(schedule("cosine", 4)(r), 3) for r in (1, 2, 3, 4)]
    [1.0, 0.854, 0.5, 0.146]
    >>> [round(schedule("exponential", 4, decay=0.5, warmup=1)(r), 3) for r in (1, 2, 3, 4)]
    [0.5, 0.5, 0.25, 0.125]
    """
    if warmup:
        if not 0 < warmup < rounds:
            raise FLError(f"--lr-warmup {warmup} of --rounds {rounds}: it has to end before the run, take fewer rounds")
        after = schedule(name, rounds, factor, at, decay)
        return lambda number: min(1.0, number / (warmup + 1)) * after(number)
    if name == "constant":
        return lambda _: 1.0
    if name == "exponential":
        if not 0 < decay <= 1:
            raise FLError(f"--lr-decay lies in (0, 1], got {decay}")
        return lambda number: decay ** (number - 1)
    if name == "cosine":
        return lambda number: (1 + math.cos(math.pi * (number - 1) / rounds)) / 2
    if name != "step":
        raise FLError(f"unknown --lr-schedule {name!r}: there are {', '.join(SCHEDULES)}", code="name")
    if not all(0 < share < 1 for share in at) or not 0 < factor <= 1:
        raise FLError(f"--lr-factor lies in (0, 1] and --lr-steps in (0, 1), got {factor} and {','.join(map(str, at))}")
    ends = [max(1, math.floor(share * rounds + 1e-9)) for share in at]
    return lambda number: factor ** sum(number > end for end in ends)
