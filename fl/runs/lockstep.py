"""Ranks of one run in step: the same settings, the same server, the same end."""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from fl import data
from fl.base.errors import FLError
from fl.base.plugins import version_of
from fl.base.settings import write_value
from fl.base.torch_private import tree_map
from fl.distributed import current
from fl.runs import checkpoint
from fl.runs.state import RunState
from fl.settings.config import plain

_FREE = {"out", "name", "device", "data-on", "data-root", "log", "checkpoint-every", "keep-best"}
"""Flags that ranks may have different values of."""


def check_ranks_agree(run: RunState) -> None:
    """Check that all ranks do the same run, and start them at the round of rank 0.

    Raises:
        FLError: if a rank has other settings, another version or other data than rank 0; it says which and in what.
    """
    ranks = current()
    if ranks.size == 1:
        return
    ranks.device = run.fed.data.device
    words = {package: version_of(package) for package in ("layer-surgery", "torch")}
    words |= {
        f"--{setting.flag}": plain(setting.value)
        for setting in run.config.settings()
        if not setting.unread and setting.flag not in _FREE
    }
    words |= {f"data {part}": value for part, value in data.fingerprint(run.fed.data).items()}
    model = str({name: list(tensor.shape) for name, tensor in checkpoint.flatten(run.server).items()})
    words |= {"device": ranks.device.type, "model": hashlib.sha256(model.encode()).hexdigest()[:12]}
    reports = ranks.tell((run.done, words))
    run.done, first = reports[0]
    for rank, (_, other) in enumerate(reports):
        for name in first | other:
            its, expected = (write_value(word.get(name)) for word in (other, first))
            if its != expected:
                reason = f"rank {rank} has {name} {its}, and rank 0 has {expected}"
                raise FLError(f"{reason}: start all ranks with the same command on the same data", code="peers")


def sync_server(run: RunState) -> dict | None:
    """Continue with the server of rank 0; return its summary if it has ended the run.

    Other ranks have the same server, bit for bit, where their processors compute alike; where they do not, or rank 0
    has resumed the run, it is sent.
    """
    ranks = current()
    if ranks.size == 1:
        return None
    words = ranks.tell((None, _sums([tensor for state in run.server.values() for tensor in state.values()])))
    summary, sums = words[0]
    if summary is None and any(word != sums for _, word in words):
        shared = ranks.gather(run.server if ranks.rank == 0 else {})[0]
        run.server = tree_map(lambda local, its: its.to(local.device), run.server, shared)
    return summary


def tell_end(summary: dict) -> None:
    """End the run of all ranks, which wait in `sync_server`, with rank 0's summary."""
    current().tell((summary, []))


def _sums(tensors: Sequence[Tensor]) -> list[int]:
    """Return a checksum of each tensor; a stack of one model is read once."""
    sums = []
    for tensor in tensors:
        if tensor.ndim and tensor.stride(0) == 0 and len(tensor) > 1:
            tensor = tensor[:1]
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
        sums.append(tensor.contiguous().view(-1).view(whole).sum(dtype=torch.int64))
    return torch.stack([checksum.cpu() for checksum in sums]).tolist()
