"""One client after another, plain and eager: the reference that the other backends are compared with."""

from typing import Any

import torch
from torch.utils._pytree import tree_map

from fl.engine.job import Job, Trained
from surgery import Stack, stack, unstack


def train(job: Job, starts: Stack, context: Any) -> Trained:
    """Train K clients sequentially. See `fl.engine.train`."""
    job.model.train()
    names = job.trainable()
    states, losses = [], []
    for k, (start, steps) in enumerate(zip(unstack(starts), job.batches.steps)):
        state = {name: tensor.clone() for name, tensor in start.items()}
        mine = tree_map(lambda tensor, k=k: tensor[k], context)
        params = {name: state.pop(name).requires_grad_() for name in names}
        values = list(params.values())
        momentum = [torch.zeros_like(p) for p in values]
        total = 0.0
        for s in range(steps):
            loss = job.loss(params, state, mine, job.batches.index[k, s])
            gradients = torch.autograd.grad(loss, values, allow_unused=True)
            with torch.no_grad():
                job.sgd.step(values, momentum, list(gradients))
            total = total + loss.detach()
        losses.append(total / steps)
        trained = {**state, **{name: p.detach() for name, p in params.items()}}
        states.append({name: trained[name] for name in starts})
    return Trained(stack(states), torch.stack(losses))
