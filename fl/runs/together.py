"""What the ranks of a run agree on: that it is the same run, and what the server keeps."""

import hashlib
import json
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch
import yaml
from torch import Tensor

from fl import data
from fl.algorithms.algorithm import Server
from fl.base.errors import FLError
from fl.base.flags import written
from fl.config.yaml_settings import flat
from fl.parallel import current
from fl.runs.checkpoint import flatten
from fl.runs.simulation import Simulation

_FREE = {"out", "name", "device", "data-root", "log", "checkpoint-every", "keep-best"}
"""Flags that ranks may have different values of."""


def greet(run: Simulation) -> None:
    """See that all ranks are about to do the same run, and let them have the server and the round of rank 0, whose run
    may be resumed.

    Raises:
        FLError: if a rank has other settings, another version or other data than rank 0; it says which and in what.
    """
    ranks = current()
    if ranks.size == 1:
        return
    ranks.device = run.fed.data.x.device
    model = {name: list(tensor.shape) for name, tensor in flatten(run.server).items()}
    settings = flat(yaml.safe_load(run.config.to_yaml()))
    mine = {
        "layer-surgery": _version("layer-surgery"),
        "torch": torch.__version__,
        "settings": {flag: value for flag, value in settings.items() if flag not in _FREE},
        "data": data.fingerprint(run.fed.data),
        "device": run.fed.data.x.device.type,
        "model": hashlib.sha256(json.dumps(model).encode()).hexdigest(),
        "round": run.done,
    }
    words = ranks.exchange(mine)
    for rank, word in enumerate(words):
        if reason := _differs(words[0], word):
            raise FLError(f"rank {rank} {reason}: start all ranks with the same command on the same data")
    run.done = words[0]["round"]
    run.server = agreed(run.server, run.done + 1)
    ranks.read_moved()  # is no part of a round


def agreed(server: Server, number: int) -> Server:
    """The server before a round, as rank 0 has it. Other ranks have the same one, bit for bit, where their processors
    compute alike; where they do not, or rank 0 has resumed a run, it is sent.

    Raises:
        Stopped: if rank 0 does no further round.
    """
    ranks = current()
    if ranks.size == 1:
        return server
    names = [(part, name) for part, state in server.items() for name in state]
    tensors = [server[part][name] for part, name in names]
    words = ranks.exchange({"round": number, "sums": _sums(tensors)})
    if all(word["sums"] == words[0]["sums"] for word in words):
        return server
    values = ranks.gather({str(i): tensor for i, tensor in enumerate(tensors)} if ranks.rank == 0 else {})[0].values()
    if ranks.rank == 0:
        return server
    result: Server = {part: dict(state) for part, state in server.items()}
    for (part, name), value in zip(names, values):
        result[part][name] = value.to(server[part][name].device)
    return result


def _sums(tensors: Sequence[Tensor]) -> list[int]:
    """A number for each tensor that changes with nearly any of its bits; a stack of one model is looked at once."""
    sums = []
    for tensor in tensors:
        if tensor.ndim and tensor.stride(0) == 0 and len(tensor) > 1:
            tensor = tensor[:1]
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
        sums.append(tensor.contiguous().view(-1).view(whole).sum(dtype=torch.int64))
    return torch.stack([each.cpu() for each in sums]).tolist()


def _differs(first: dict, other: dict) -> str:
    """In what a rank differs from rank 0, if it does."""
    for package in ("layer-surgery", "torch"):
        if first[package] != other[package]:
            return f"has {package} {other[package]}, and rank 0 has {first[package]}"
    for flag in first["settings"] | other["settings"]:
        its, mine = (word["settings"].get(flag) for word in (first, other))
        if its != mine:
            return f"has --{flag} {_shown(mine)}, and rank 0 has {_shown(its)}"
    for part, value in first["data"].items():
        if other["data"].get(part) != value:
            return f"has other data than rank 0 ({part} differs)"
    if first["device"] != other["device"]:
        return f"trains on {other['device']}, and rank 0 on {first['device']}"
    return "" if first["model"] == other["model"] else "has another model than rank 0"


def _shown(value: Any) -> str:
    return written(tuple(value)) if isinstance(value, list) else str(value)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
