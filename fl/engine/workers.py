"""Clients side by side in threads, for the CPU: each thread trains one client at a time in a replica of its own.

One small step cannot keep several cores busy, but several steps can. Torch releases Python's lock while it computes.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from fl.engine import progress
from fl.engine.job import Group, Results, longest_first
from fl.engine.replica import Replica


def train(groups: Sequence[Group]) -> list[Results]:
    """Train the clients of all groups in as many threads as torch may use. See `fl.engine.train`."""
    results = [Results.empty(group) for group in groups]
    clients = longest_first(groups)
    allowed = torch.get_num_threads()
    count = min(allowed, len(clients))
    queue, lock, failed = iter(clients), threading.Lock(), threading.Event()

    def work() -> None:
        torch.set_num_threads(allowed // count)
        replicas: dict[int, Replica] = {}
        try:
            while not failed.is_set():
                with lock:
                    g, k = next(queue, (None, None))
                if g is None:
                    return
                if g not in replicas:
                    replicas[g] = Replica(groups[g])
                for _ in replicas[g].train(k, results[g]):
                    if failed.is_set():
                        return
                progress.count(1)
        except BaseException:
            failed.set()  # the other threads stop after their step
            raise

    try:
        with ThreadPoolExecutor(count, thread_name_prefix="fl-client") as pool:
            futures = [pool.submit(work) for _ in range(count)]
            try:
                for future in futures:
                    future.result()
            except BaseException:  # also Ctrl-C
                failed.set()
                raise
    finally:
        torch.set_num_threads(allowed)  # it is a setting of the process as well as of the thread
    return results
