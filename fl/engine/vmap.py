"""All clients side by side: one step of K models is one call over stacked tensors (torch.func.vmap)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from fl.engine.job import Job, Trained
from fl.errors import FLError
from surgery import Stack


def train(job: Job, starts: Stack, context: Any) -> Trained:
    """Train K clients in stacked tensors. See `fl.engine.train`.

    Clients are sorted by their number of steps, so that those still training are a leading slice: a finished
    client neither changes nor costs anything.
    """
    job.model.train()
    steps = job.batches.steps
    device = job.batches.index.device
    order = torch.tensor(sorted(range(len(steps)), key=lambda k: -steps[k]), device=device)
    rest, context, index = tree_map(lambda t: t.index_select(0, order), (starts, context, job.batches.index))
    params = {name: rest.pop(name) for name in job.trainable()}
    momentum = {name: torch.zeros_like(p) for name, p in params.items()}
    total = torch.zeros(len(steps), device=device, dtype=next(iter(params.values())).dtype)
    losses = vmap(job.loss)

    for s in range(max(steps)):
        active = sum(n > s for n in steps)
        p, r, m, c, i = tree_map(lambda t, active=active: t[:active], (params, rest, momentum, context, index[:, s]))
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in p.items()}  # views of params
        # Clients do not share anything, so the gradient of the sum holds each one's own: ordinary autograd around
        # vmap does, which spares the backward pass the layers of torch.func.grad inside it.
        loss = _vectorised(losses, job.model, leaves, r, c, i)
        gradients = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
        job.sgd.step(list(p.values()), list(m.values()), list(gradients), lead=1)
        total[:active] += loss.detach()

    back = order.argsort()
    states = {**rest, **params}
    counts = torch.tensor(steps, device=device)
    return Trained({name: states[name].index_select(0, back) for name in starts}, total[back] / counts)


def _vectorised(losses: Callable[..., Tensor], model: nn.Module, *arguments) -> Tensor:
    """losses(*arguments), where an operation that vmap refuses is named."""
    try:
        return losses(*arguments)
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        if "vmap" in reason or "atching rule" in reason:
            raise FLError(f"{type(model).__name__} cannot train side by side: {reason}; use --backend loop") from error
        raise
