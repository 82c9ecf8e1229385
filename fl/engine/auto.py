"""Choose the backend that was measured to be fastest for jobs of this size."""

import functools
import json
import math
from collections.abc import Sequence
from importlib import resources

import torch
from torch import nn

from fl.engine.job import Group, Job
from fl.engine.work import flops, share_of_products
from surgery.states import owners

_TINY = 2 * 10**6  # floating-point operations of one sample's forward pass: LeNet's 1.3 million are below it
_OTHER = 3.0  # matrix products in the place of convolutions count as much as 20 times the work
_DENSE = (nn.Linear, nn.LayerNorm, nn.BatchNorm1d, nn.RMSNorm)


def ranked(groups: Sequence[Group]) -> list[str]:
    """The backends that can train these groups, the fastest first; the last one is `loop`, which trains everything.

    Their order is that of the nearest row of this device's measurements (`benchmarks/engine.py`), where distances are
    between logarithms: of the number of threads, of the cohort's size and of the work of a step; and between the shares
    of matrix products, since attention and convolutions gain differently from the same backend. Without measurements an
    accelerator is assumed to wait for the launches of many small kernels: tiny models, and models of linear layers
    only, then train as one program, the others as graphs, since convolutions of many clients at once are slow.
    """
    job = groups[0][0]
    able = ["loop", "workers" if job.device.type == "cpu" else "graphs"]
    if len(groups) == 1 and not job.precision.channels_last:
        able.append("vmap")
    order = _order(groups, able)
    return [*order[: order.index("loop")], "loop"]


def _order(groups: Sequence[Group], able: Sequence[str]) -> list[str]:
    """The able backends, the fastest first."""
    job = groups[0][0]
    rows = _rows(job.device.type)
    if not rows:
        tiny = 0 < flops(job.model, job.data) <= _TINY or all(isinstance(m, _DENSE) for _, m, _ in owners(job.model))
        guess = ("vmap", "graphs", "loop") if tiny else ("graphs", "vmap", "loop")
        return [name for name in guess if name in able]
    clients = [len(job.batches.steps) for job, _, _ in groups]
    mean = sum(n * work(job) for n, (job, _, _) in zip(clients, groups)) // sum(clients)
    if not mean:
        return ["loop"]
    here = [math.log(n) for n in (torch.get_num_threads(), sum(clients), mean)]
    products = share_of_products(job.model, job.data)

    def distance(row: dict) -> float:
        apart = sum((math.log(row[n]) - x) ** 2 for n, x in zip(("threads", "k", "work"), here))
        return apart + (_OTHER * (row.get("products", 0.0) - products)) ** 2  # older rows are of convolutions

    nearest = min(rows, key=distance)
    return sorted([name for name in able if name in nearest["ms"]], key=nearest["ms"].get)


def work(job: Job) -> int:
    """Floating-point operations of one forward pass of one client's batch, per layer of the network.

    Running clients side by side pays off where single operations are too small to keep the device busy. 0 if the model
    cannot run on the meta device, where nothing is computed.
    """
    layers = max(1, len(list(owners(job.model))))
    return flops(job.model, job.data) // layers * job.batches.size


@functools.lru_cache(maxsize=4)
def _rows(device: str) -> list[dict]:
    file = resources.files("fl.engine") / f"engine-{device}.json"
    return json.loads(file.read_text())["rows"] if file.is_file() else []
