"""Several ranks on this machine, as torchrun starts them, without the time that importing takes: they are forked."""

import multiprocessing
import os
import socket
from contextlib import contextmanager, suppress

import torch
import torch.distributed as dist
from rounds import small

from fl import simulate
from fl.algorithms import ALGORITHMS
from fl.extensions.language.adapters import AdapterOptions
from fl.models.architectures import ArchitectureOptions
from fl.runs import checkpoint, metrics

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


def ran(size, work, *arguments, seconds=120, hung=()):
    """The exit codes of all ranks, which have to end in time; None for those that hang."""
    with started(size, work, *arguments) as processes:
        for rank, process in enumerate(processes):
            process.join(0 if rank in hung else seconds)
        return [process.exitcode for process in processes]


def _rank(rank, environment, work, arguments):
    os.environ.update(environment)
    torch.manual_seed(0)
    try:
        work(rank, *arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()  # which forked processes do not do at their exit


TINY = {
    "samples": 240,
    "clients": 6,
    "participants": 5,
    "model": "cnn",
    "width": (0.1,),
    "rounds": 2,
    "local_epochs": 1,
    "batch_size": 8,
    "backend": "loop",
    "alpha": 0.3,
    "local_valid": 0.2,
}
"""Five of six clients, who hold very different numbers of samples."""


NEED_EXITS = ("depthfl", "scalefl")
"""Methods of models with a classifier after each section."""
NEED_ADAPTERS = {
    "fedsa_lora": AdapterOptions("lora"),
    "flexlora": AdapterOptions("lora", ranks=(1, 2)),
    "flora": AdapterOptions("lora", ranks=(1, 2)),
    "flora_na": AdapterOptions("lora"),
    "hetlora": AdapterOptions("lora", ranks=(1, 2)),
}
"""Methods of adapters, and those of their clients."""


def tiny(name, **changes):
    config = small(name, **{**TINY, **changes})
    if name == "fedbn":  # which has nothing to keep at clients without batch norms
        return config.replace(model="resnet9", width=(0.25,))
    if name in NEED_ADAPTERS:
        return config.replace(adapters=NEED_ADAPTERS[name])
    if ALGORITHMS[name].clients != "heterogeneous":
        return config
    if name in ("flexifed", "inclusivefl"):
        config, chosen = config.replace(model="preresnet18", width=(0.05,)), ArchitectureOptions(depths=("1", "2"))
    else:
        chosen = ArchitectureOptions(widths=(0.5, 1.0))
    if name in NEED_EXITS:
        config = config.replace(model="resnet9", width=(0.25,), exits=True)
    return config.replace(local_valid=0.0, architectures=chosen)


def simulate_all(rank, configs, folder):
    for name, config in configs.items():
        simulate(config, folder / name)


def left(folder):
    """All that a run keeps, but the time that it took."""
    rows = [{k: v for k, v in row.items() if k not in ("seconds", "secure_seconds")}
            for row in metrics.read(folder / metrics.FILE)]  # fmt: skip
    return rows, checkpoint.flatten(checkpoint.read_parts(folder)[1])


def assert_equal(one, other):
    (rows, tensors), (more, others) = left(one), left(other)
    assert rows == more
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())
