"""Parallel work on the CPU."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

_Job = TypeVar("_Job")
_Result = TypeVar("_Result")


def in_threads(function: Callable[[_Job], _Result], jobs: Sequence[_Job]) -> list[_Result]:
    """Apply the function to all jobs in as many threads as torch has, one core each.

    This is faster than torch's own threads, since operations on pieces that fit into the cache are too short to be
    split.
    For the CPU only: threads have neither the caller's streams nor its gradient mode.
    """
    allowed = torch.get_num_threads()
    count = min(allowed, len(jobs))
    if count < 2:
        return [function(job) for job in jobs]
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(function, jobs))
    finally:
        torch.set_num_threads(allowed)  # the threads' setting also changed the process's
