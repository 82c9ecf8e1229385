"""What a run needs to go on: the server's tensors and, in the same file, the round they belong to."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

from fl.algorithm import Server
from fl.errors import FLError
from surgery import SurgeryError
from surgery.state import check_same

FILE = "checkpoint.safetensors"
_FORMAT = "1"


def save(folder: Path, server: Server, round: int) -> None:
    """Write the checkpoint of a run folder atomically: whoever reads sees the old one or the new one, whole.

    One safetensors file named `part/tensor`, whose header carries JSON, so that tensors and round cannot get
    apart as two files could.
    """
    tensors = {key: tensor.contiguous() for key, tensor in flatten(server).items()}
    header = {"format": _FORMAT, "state": json.dumps({"round": round, "parts": list(server)})}
    with replacing(folder / FILE) as temporary:
        temporary.write_bytes(serialise(tensors, metadata=header))  # save_file makes files private to the user


def restore(folder: Path, like: Server) -> tuple[Server, int]:
    """(server, round) from a run folder.

    Args:
        like: a server of the same method and model, `algorithm.init()`; its devices and dtypes are taken.

    Raises:
        FLError: if the file is missing, damaged, of a newer format, or holds another model or method.
    """
    path = folder / FILE
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    except FileNotFoundError:
        raise FLError(f"{folder} has no {FILE}: nothing to resume") from None
    except (SafetensorError, OSError) as error:
        raise FLError(f"{path} cannot be read: {error}") from None
    if header.get("format") != _FORMAT:
        raise FLError(f"{path} has format {header.get('format')}, this version reads {_FORMAT}")
    expected = flatten(like)
    try:
        check_same(expected, tensors, "this run", "the checkpoint")
    except SurgeryError as error:
        raise FLError(f"{path} holds another model: {error}") from None
    server = {
        part: {name: tensors[f"{part}/{name}"].to(value) for name, value in state.items()}
        for part, state in like.items()
    }
    return server, json.loads(header["state"])["round"]


def flatten(server: Server) -> dict[str, Tensor]:
    """All tensors of a server under `part/name`."""
    return {f"{part}/{name}": tensor for part, state in server.items() for name, tensor in state.items()}


class replacing:
    """Context: a path to write to, that takes the place of `path` when the block ends well."""

    def __init__(self, path: Path) -> None:
        self.path, self.temporary = path, path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def __enter__(self) -> Path:
        return self.temporary

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            self.temporary.unlink(missing_ok=True)
            return
        with open(self.temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(self.temporary, self.path)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, value: Mapping) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")
