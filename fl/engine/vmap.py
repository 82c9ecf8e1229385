"""All clients side by side: one step of K models is one call (torch.func.vmap)."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from fl.base.errors import Refused
from fl.base.torch_private import tree_map
from fl.engine.draws import Draws
from fl.engine.job import Group, GroupResults, Job
from fl.engine.objectives import Ascent, Batch
from fl.engine.progress import count
from surgery import State
from surgery.attention import plain_attention
from surgery.transfer import upload


class _Padding(TorchFunctionMode):
    """A mode in which embeddings do not learn the row of padding_idx.

    torch ignores padding_idx if each client has a table of its own.
    """

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function is not F.embedding:
            return function(*args, **(kwargs or {}))
        return _embedding(*args, **(kwargs or {}))


def _embedding(input: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **kwargs: Any) -> Tensor:
    rows = F.embedding(input, weight, None, *args, **kwargs)
    if padding_idx is None:
        return rows
    return torch.where((input == padding_idx % len(weight)).unsqueeze(-1), rows.detach(), rows)


def _pads(model: nn.Module) -> bool:
    return any(getattr(module, "padding_idx", None) is not None for module in model.modules())


def train(groups: Sequence[Group]) -> list[GroupResults]:
    """Train the groups one by one, in stacked tensors. See `fl.engine.train`.

    Attention is computed as plain matrix products: fused kernels prepare for a backward pass only if `requires_grad` is
    set, which it never is within vmap.
    """
    with plain_attention, _Padding() if any(_pads(job.model) for job, _, _ in groups) else nullcontext():
        return [_train(*group) for group in groups]


def _train(job: Job, starts: State, context: Any) -> GroupResults:
    """Train one group, sorted by the number of steps.

    Clients that still train are a leading slice: a finished client does not change and costs nothing.
    """
    job.model.train()
    steps = job.batches.steps
    order = upload(torch.tensor(sorted(range(len(steps)), key=lambda k: -steps[k])), job.device)
    rest, rows = tree_map(lambda t: t.index_select(0, order), (starts, job.batches.rows))
    context = tree_map(lambda t: t.index_select(0, order) if t.stride(0) else t, context)  # shared values stay shared
    params = {name: rest.pop(name) for name in job.trainable()}
    memory = job.optimizer.memory(list(params.values()))
    dtype = next(iter(params.values())).dtype
    total = torch.zeros(len(steps), device=job.device, dtype=job.loss_dtype)
    positions: dict = {}  # see `Draws`

    def train_one(trained: State, rest: State, context: Any, batch: Batch, key: Tensor) -> Any:
        def call(params: State, x: Tensor) -> Tensor:
            state = {**rest, **trained, **params}
            out = functional_call(job.model, state, (x,))
            if moved := [name for name in rest if state[name] is not rest[name]]:
                raise Refused(
                    f"{type(job.model).__name__} cannot train side by side: it puts a new tensor in the place of the "
                    f"buffer {moved[0]}; change it in place, or use --backend loop"
                )
            return out

        return job.loss(call, trained, context, batch, Draws(key, positions=positions))

    losses = vmap(train_one)
    for s in range(max(steps)):
        active = sum(n > s for n in steps)
        p, r, c, row = tree_map(lambda t, n=active: t[:n], (params, rest, context, rows[:, s]))
        # Adam's count of steps is the same for all clients.
        active_memory = tree_map(lambda t, n=active: t[:n] if t.ndim else t, memory)
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in p.items()}  # views of params
        # Clients share nothing, so the gradient of the sum holds each client's own: ordinary autograd around vmap is
        # enough, and faster than torch.func.grad inside it.
        step = job.batches.step(row)
        batch = job.fetch(step, dtype)
        loss = _vectorise(losses, job.model, leaves, r, c, batch, step.key)
        gradients = torch.autograd.grad(loss.sum(), list(leaves.values()), allow_unused=True)
        if job.ascent:
            ahead, before = _ahead(job.ascent, p, gradients), {name: t.clone() for name, t in r.items()}
            there = _vectorise(losses, job.model, ahead, r, c, batch, step.key)
            gradients = torch.autograd.grad(there.sum(), list(ahead.values()), allow_unused=True)
            for name, value in before.items():  # buffers stay as the pass at the parameters left them
                r[name].copy_(value)
        job.optimizer.step(list(p.values()), active_memory, gradients, lead=1)
        total[:active] += loss.detach()
        count(active / sum(steps) * len(steps))

    back = order.argsort()
    states = {**rest, **params}
    counts = upload(torch.tensor(steps), job.device)
    return GroupResults({name: states[name].index_select(0, back) for name in starts}, total[back] / counts)


def _ahead(ascent: Ascent, params: State, gradients: Sequence[Tensor | None]) -> State:
    """Return the stacked parameters where the ascent leads, as leaves."""
    known = {name: g for name, g in zip(params, gradients) if g is not None}
    step = vmap(ascent)({name: params[name] for name in known}, known)
    return {n: (p + step[n] if n in step else p).detach().requires_grad_() for n, p in params.items()}


def _vectorise(losses: Callable[..., Any], model: nn.Module, *arguments) -> Any:
    """losses(*arguments); an error names the operation that vmap refuses."""
    try:
        return losses(*arguments)
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        if any(part in reason for part in ("vmap", "atching rule", "does not require grad")):
            raise Refused(f"{type(model).__name__} cannot train side by side: {reason}; use --backend loop") from error
        raise
