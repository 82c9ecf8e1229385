"""Local training: K clients, each from a start of its own, on its own data, for its own number of steps.

Backends share one signature, `train(job, starts, context) -> Trained`, follow the same batches and give the same
result (to float32 rounding): `loop` trains one client after another and is the reference; `vmap` trains them side by
side in stacked tensors; `auto` picks the one that was measured to be faster for the job's size.
"""

from collections.abc import Callable
from typing import Any

from fl.engine import loop, vmap
from fl.engine.auto import choose
from fl.engine.job import SGD, Job, Trained
from fl.errors import FLError
from surgery import Stack

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
    """
    if backend == "auto":
        backend = choose(job, starts)
    if backend not in BACKENDS:
        raise FLError(f"unknown backend {backend!r}: there are {', '.join(backend_names())}")
    return BACKENDS[backend](job, starts, {} if context is None else context)
