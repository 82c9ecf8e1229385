"""Choose the backend that was measured to be faster for a job of this size."""

import copy
import functools
import json
import math
from importlib import resources
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fl.engine.job import Job
from surgery import Stack, count
from surgery.state import owners


def choose(job: Job, starts: Stack) -> str:
    """The faster backend of the nearest row of this device's measurements (`benchmarks/engine.py`).

    Near is by the logarithms of the cohort's size and of the work of a step. A device without measurements
    gets `vmap`, since accelerators wait for the launches of many small kernels.
    """
    rows = _rows(job.data.x.device.type)
    if not rows:
        return "vmap"
    if not (flops := work(job)):
        return "loop"
    k, size = math.log(count(starts)), math.log(flops)
    nearest = min(rows, key=lambda r: (math.log(r["k"]) - k) ** 2 + (math.log(r["work"]) - size) ** 2)
    return "vmap" if nearest["ratio"] > 1 else "loop"


def work(job: Job) -> int:
    """Floating-point operations of one forward pass of one client's batch, per layer of the network.

    Running clients side by side pays where single operations are too small to keep the device busy. 0 if the
    model cannot run on the meta device, where nothing is computed.
    """
    image = job.data.x.shape[1:]
    known = _FLOPS.setdefault(job.model, {})
    if image not in known:
        known[image] = _flops_per_layer(job.model, image)
    return known[image] * job.batches.index.shape[-1]


_FLOPS: WeakKeyDictionary[nn.Module, dict[torch.Size, int]] = WeakKeyDictionary()


def _flops_per_layer(model: nn.Module, image: torch.Size) -> int:
    shadow = copy.deepcopy(model).to("meta").eval().requires_grad_(False)
    dtype = next(p.dtype for p in shadow.parameters())
    try:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            shadow(torch.zeros(2, *image, device="meta", dtype=dtype))  # static batch norms refuse one image
    except (RuntimeError, ValueError, AssertionError, TypeError):  # an operation whose result depends on data
        return 0
    return counter.get_total_flops() // 2 // max(1, len(list(owners(shadow))))


@functools.lru_cache(maxsize=4)
def _rows(device: str) -> list[dict]:
    file = resources.files("fl.engine") / f"engine-{device}.json"
    return json.loads(file.read_text())["rows"] if file.is_file() else []
