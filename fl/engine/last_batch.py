"""Partial last batches where clients train side by side: all batches have one shape, and what fills them is ignored.

The samples that fill a batch up have a label that cross entropy leaves out. That is right only as far as nothing else
in the model or the objective looks at them, which is tried once for each pair of these. The other backends (loop,
workers) pass the real samples alone and need none of this.
"""

from collections.abc import Callable
from contextlib import suppress
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from fl.base.errors import Refused
from fl.engine.batches import IGNORED
from fl.engine.draws import Drawing, Draws
from fl.engine.job import Group
from fl.engine.objectives import Batch
from surgery import State
from surgery.errors import first_line

_KNOWN: WeakKeyDictionary[nn.Module, WeakSet] = WeakKeyDictionary()
"""The objectives with which a model was tried."""


def check(group: Group) -> None:
    """Raise Refused unless a batch that is filled up trains a client as its real samples alone would.

    It is tried on the CPU, since labels that an objective does not expect would stop a GPU for good.
    """
    job, _, _ = group
    if job.batches.real is None or job.batches.size == 1 or not job.batches.steps:
        return
    known = _KNOWN.setdefault(job.model, WeakSet())
    if job.objective in known:
        return
    try:
        alone, together = _losses(group)
    except Exception as error:  # of the user's model or objective, which may not expect such labels or few samples
        reason = f"a batch of half as many samples, filled up with labels of {IGNORED}, fails ({first_line(error)})"
        raise Refused(_refusal(group, reason)) from error
    for name in alone:
        if not torch.allclose(together[name], alone[name], rtol=1e-3, atol=1e-5, equal_nan=True):
            raise Refused(_refusal(group, f"{name or 'the loss'} of a batch depends on the samples that fill it up"))
    with suppress(TypeError):  # what has no weak references is tried again
        known.add(job.objective)


def _losses(group: Group) -> tuple[State, State]:
    """The loss of half a batch, under the name "", and the buffers that it leaves: by itself, and filled up."""
    job, starts, context = group
    step = job.batches.step(job.batches.rows[0, 0])
    step = step._replace(index=torch.maximum(step.index, ~step.index))
    state, inputs, key, (x, y, *more) = tree_map(
        lambda tensor: tensor.detach().cpu(),
        (_first(starts), _first(context), step.key, tuple(job.fetch(step, _dtype(group)))),
    )
    half = (len(y) + 1) // 2
    if x.is_floating_point():  # unlike the real samples, even where a client has one sample again and again
        x[half:] = 1 - 2 * x[half:]
    few = tuple(tensor[:half] for tensor in (x, y, *more))
    y = y.clone()
    y[half:] = IGNORED
    own = set(job.trainable())
    buffers = [name for name in state if name not in own]

    def tried(batch: Batch) -> State:
        mine = {name: tensor.clone() for name, tensor in state.items()}
        params = {name: mine[name].requires_grad_() for name in job.trainable()}
        with Drawing(Draws(key)):
            loss = job.objective(_calling(job.model, mine), params, inputs, batch)
        return {"": loss.detach(), **{name: mine[name].detach().double() for name in buffers}}

    job.model.train()
    return tried(few), tried((x, y, *more))


def _calling(model: nn.Module, state: State) -> Callable[[State, Tensor], Tensor]:
    return lambda params, x: functional_call(model, state | params, (x,))


def _first(entries: object) -> object:
    return tree_map(lambda tensor: tensor[0], entries)


def _dtype(group: Group) -> torch.dtype:
    job, starts, _ = group
    return starts[job.trainable()[0]].dtype


def _refusal(group: Group, reason: str) -> str:
    job, _, _ = group
    return (
        f"{type(job.model).__name__} cannot train on partial last batches side by side: {reason}; use --backend loop, "
        "or workers on the CPU, or --last-batch filled"
    )
