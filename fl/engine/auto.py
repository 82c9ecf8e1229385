"""Choose the backend that was measured to be fastest for jobs of this size."""

import copy
import functools
import json
import math
from collections.abc import Sequence
from importlib import resources
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fl.engine.job import Group, Job
from surgery.state import owners


def choose(groups: Sequence[Group], stackable: bool = True) -> str:
    """The fastest backend of the nearest row of this device's measurements (`benchmarks/engine.py`).

    Near is by the logarithms of the number of threads, of the cohort's size and of the work of a step. A device
    without measurements gets `vmap` where it can be had, since accelerators wait for the launches of many small
    kernels.

    Args:
        stackable: whether vmap takes the models.
    """
    job = groups[0][0]
    able = {"loop", "workers"} if job.device.type == "cpu" else {"loop", "graphs"}
    if stackable and len(groups) == 1 and not job.precision.channels_last:
        able.add("vmap")
    rows = _rows(job.device.type)
    if not rows:
        return "vmap" if "vmap" in able else "loop"
    clients = [len(job.batches.steps) for job, _, _ in groups]
    flops = sum(n * work(job) for n, (job, _, _) in zip(clients, groups)) // sum(clients)
    if not flops:
        return "loop"
    here = [math.log(n) for n in (torch.get_num_threads(), sum(clients), flops)]
    nearest = min(
        rows, key=lambda row: sum((math.log(row[n]) - x) ** 2 for n, x in zip(("threads", "k", "work"), here))
    )
    return min(able & nearest["ms"].keys(), key=nearest["ms"].get)


def work(job: Job) -> int:
    """Floating-point operations of one forward pass of one client's batch, per layer of the network.

    Running clients side by side pays where single operations are too small to keep the device busy. 0 if the
    model cannot run on the meta device, where nothing is computed.
    """
    sample = job.data.x.shape[1:]
    known = _FLOPS.setdefault(job.model, {})
    if sample not in known:
        known[sample] = _flops_per_layer(job, sample)
    return known[sample] * job.batches.index.shape[-1]


_FLOPS: WeakKeyDictionary[nn.Module, dict[torch.Size, int]] = WeakKeyDictionary()


def _flops_per_layer(job: Job, sample: torch.Size) -> int:
    shadow = copy.deepcopy(job.model).to("meta").eval().requires_grad_(False)
    dtype = next(p.dtype for p in shadow.parameters())
    two = torch.zeros(2, *sample, device="meta", dtype=job.data.x.dtype)  # static batch norms refuse one image
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            shadow(job.data.normalise(two, dtype))
    except (RuntimeError, ValueError, AssertionError, TypeError):  # an operation whose result depends on data
        return 0
    return counter.get_total_flops() // 2 // max(1, len(list(owners(shadow))))


@functools.lru_cache(maxsize=4)
def _rows(device: str) -> list[dict]:
    file = resources.files("fl.engine") / f"engine-{device}.json"
    return json.loads(file.read_text())["rows"] if file.is_file() else []
