"""Local training: K clients, each from a start of its own, on its own data, for its own number of steps.

Backends share one signature, `train(job, starts, context) -> Trained`, follow the same batches and give the same
result (to float32 rounding): `loop` trains one client after another and is the reference; `vmap` trains them side by
side in stacked tensors; `auto` picks the one that was measured to be faster for the job's size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fl.engine import loop, vmap
from fl.engine.auto import choose
from fl.engine.job import Job, Trained
from fl.engine.sgd import SGD
from fl.errors import FLError
from surgery import Stack, broadcast, count
from surgery.state import owners

__all__ = ["BACKENDS", "SGD", "Job", "Trained", "backend_names", "train"]

BACKENDS: dict[str, Callable[[Job, Stack, Any], Trained]] = {"loop": loop.train, "vmap": vmap.train}


def backend_names() -> list[str]:
    """What `train` takes as a backend.

    >>> backend_names()
    ['auto', 'loop', 'vmap']
    """
    return ["auto", *BACKENDS]


def train(job: Job, starts: Stack, context: Any = None, backend: str = "auto") -> Trained:
    """Train K clients.

    Args:
        job: what they have in common, see `Job`.
        starts: stack of the K starting states; it is not changed.
        context: per-client inputs of the objective: tensors with a leading axis K, in nested dicts.
        backend: one of `backend_names()`.

    Raises:
        FLError: for a backend that is unknown or cannot run the model, and a model that draws random numbers.
    """
    if count(starts) != len(job.batches.steps):
        raise FLError(f"{count(starts)} starting states for {len(job.batches.steps)} clients: give one each")
    if backend == "auto":
        backend = choose(job, starts)
    if backend not in BACKENDS:
        raise FLError(f"unknown backend {backend!r}: there are {', '.join(backend_names())}")
    # Buffers that are no state (non-persistent) start from the model's own in each client, and end with the round.
    known = {id(tensor) for _, _, own in owners(job.model) for tensor in own.values()}
    passing = {name: b.detach() for name, b in job.model.named_buffers() if name not in starts and id(b) not in known}
    before = _global_rng(job)
    trained = BACKENDS[backend](job, {**starts, **broadcast(passing, count(starts))}, context or {})
    if not all(map(torch.equal, before, _global_rng(job))):
        raise FLError(
            f"{type(job.model).__name__} draws from torch's global generator in training (dropout, drop path?), so "
            "that runs could not be repeated: set its rate to 0"
        )
    return Trained({name: trained.states[name] for name in starts}, trained.loss)


def _global_rng(job: Job) -> list[Tensor]:
    device = job.data.x.device
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]
