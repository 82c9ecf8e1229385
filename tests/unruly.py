"""Backends that misbehave, for a process of their own to try; and an objective that takes them long or not."""

import os
import signal
import time

import torch

from fl.engine.eager import loop
from fl.engine.objectives import cross_entropy

_pause = 0.02


def paused(call, params, context, batch):
    """An objective whose steps take long, but with `quick`."""
    time.sleep(_pause)
    return cross_entropy(call, params, context, batch)


def quick(groups):
    global _pause
    before, _pause = _pause, 0.0
    try:
        return loop(groups)
    finally:
        _pause = before


def slow(groups):
    time.sleep(0.1)
    return loop(groups)


def raises(groups):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def differs(groups):
    """One of the steps is not made."""
    steps = [tuple(max(1, n - 1) for n in job.batches.steps) for job, _, _ in groups]
    jobs = [
        job.__class__(**{**vars(job), "batches": job.batches._replace(steps=n)}) for (job, *_), n in zip(groups, steps)
    ]
    return quick([(job, *rest) for job, (_, *rest) in zip(jobs, groups)])


def wavers(groups):
    """Each training ends a bit elsewhere, within what rounding may do."""
    done = quick(groups)
    for result in done:
        for tensor in result.states.values():
            if tensor.is_floating_point():
                tensor += 1e-7 * torch.randn(tensor.shape)
    return done


def nan(groups):
    done = quick(groups)
    next(iter(done[0].states.values())).view(-1)[0] = torch.nan
    return done


def hangs(groups):
    while True:
        time.sleep(1)


def ends(groups):
    os._exit(3)


def crashes(groups):
    os.kill(os.getpid(), signal.SIGSEGV)
