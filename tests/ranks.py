"""Several ranks on this machine, as torchrun starts them, without the time that importing takes: they are forked."""

import multiprocessing
import os
import socket
from contextlib import contextmanager, suppress

import torch

FORK = multiprocessing.get_context("fork")


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextmanager
def started(size, work, *arguments):
    """`work(rank, *arguments)` in `size` processes, whose exit codes are those of `SystemExit`, or 1."""
    torch.set_num_threads(1)  # a process that had several cannot be forked
    address = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        FORK.Process(target=_rank, args=(rank, address | {"RANK": str(rank)}, work, arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    try:
        yield processes
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                process.kill()
            process.join()


def ran(size, work, *arguments, seconds=120):
    """The exit codes of all ranks, which have to end in time."""
    with started(size, work, *arguments) as processes:
        for process in processes:
            process.join(seconds)
        return [process.exitcode for process in processes]


def _rank(rank, environment, work, arguments):
    os.environ.update(environment)
    torch.manual_seed(0)
    work(rank, *arguments)
