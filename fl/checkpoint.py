"""What a run needs to go on: the server's tensors and, in the same file, the round they belong to."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from fl.algorithm import Server
from fl.errors import FLError
from fl.files import replacing
from surgery import State, SurgeryError, check_same

FILE = "checkpoint.safetensors"
_FORMAT = "1"


def save(folder: Path, server: Server, round: int, model: dict[str, Any]) -> None:
    """Write the checkpoint of a run folder atomically: whoever reads sees the old one or the new one, whole.

    One safetensors file with tensors named `part/tensor`, whose header carries JSON, so that tensors and round
    cannot get apart as two files could.

    Args:
        model: what `fl.models.create` is to be called with to build the model.
    """
    # Cloned, since parts may share memory (one model broadcast to all), which safetensors refuses.
    tensors = {k: t.detach().clone(memory_format=torch.contiguous_format) for k, t in flatten(server).items()}
    header = {"format": _FORMAT, "state": json.dumps({"round": round, "model": model})}
    with replacing(folder / FILE) as temporary:
        temporary.write_bytes(serialise(tensors, metadata=header))  # save_file makes files private to the user


def restore(folder: Path, like: Server) -> tuple[Server, int]:
    """(server, round) from a run folder.

    Args:
        like: a server of the same method and model, `algorithm.init()`; its devices and dtypes are taken.

    Raises:
        FLError: if the file is missing, damaged, of another format, or holds another model or method.
    """
    tensors, header = _read(folder)
    try:
        check_same(flatten(like), tensors, "this run", "the checkpoint")
    except SurgeryError as error:
        raise FLError(f"{folder / FILE} holds another model: {error}") from None
    server = {
        part: {name: tensors[f"{part}/{name}"].to(value) for name, value in state.items()}
        for part, state in like.items()
    }
    return server, header["round"]


def read_model(folder: Path) -> tuple[dict[str, Any], State]:
    """(arguments of `fl.models.create`, state of the global model) from a run folder."""
    tensors, header = _read(folder)
    return header["model"], {k.removeprefix("global/"): t for k, t in tensors.items() if k.startswith("global/")}


def flatten(server: Server) -> dict[str, Tensor]:
    """All tensors of a server under `part/name`."""
    return {f"{part}/{name}": tensor for part, state in server.items() for name, tensor in state.items()}


def _read(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    path = folder / FILE
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except FileNotFoundError:
        raise FLError(f"{folder} has no {FILE}") from None
    except (SafetensorError, OSError) as error:
        raise FLError(f"{path} cannot be read: {error}") from None
    if header.get("format") != _FORMAT or "state" not in header:
        raise FLError(f"{path} is no checkpoint of format {_FORMAT} (it has {header.get('format')})")
    return tensors, json.loads(header["state"])
