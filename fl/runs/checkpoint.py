"""What a run needs to continue: the server's tensors and, in the same file, their round."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

import zoo
from fl.algorithms.algorithm import Server
from fl.base.errors import FLError
from fl.base.files import replacing
from fl.models.own import Model
from fl.runs.given import spec_of
from surgery import State, SurgeryError, check_same
from surgery.transfer import host_copies
from zoo import Spec

FILE = "checkpoint.safetensors"
_FORMAT = "2"
_STATISTICS = "statistics"  # stored beside the parts of the server


def save(folder: Path, server: Server, round: int, spec: Spec, statistics: State) -> None:
    """Write the checkpoint of a run folder atomically: a reader finds either the old one or the new one, complete.

    It is one safetensors file with tensors named `part/tensor` and JSON in its header, so that tensors and round always
    belong together, which two files would not ensure.

    Args:
        spec: of the model.
        statistics: of the global model's static batch norms, if it has any.
    """
    # Copies, since parts may share memory (one model broadcast to all), which safetensors refuses.
    if _STATISTICS in server:
        raise FLError(f"a server has no part called {_STATISTICS!r}: that is where checkpoints keep static norms'")
    parts = flatten({**server, _STATISTICS: statistics})
    tensors = dict(zip(parts, host_copies(list(parts.values()))))
    model = dataclasses.asdict(spec)
    header = {"format": _FORMAT, "state": json.dumps({"round": round, "model": model})}
    with replacing(folder / FILE) as temporary:
        temporary.write_bytes(serialise(tensors, metadata=header))  # save_file makes files private to the user


def restore(folder: Path, like: Server, spec: Spec) -> tuple[Server, int]:
    """(server, round) from a run folder.

    Args:
        like: a server of the same method and model, `algorithm.init()`; the result has its devices and dtypes.
        spec: of the model.

    Raises:
        FLError: if the file is missing, damaged, of another format, or holds another model or method.
    """
    tensors, header = _read(folder)
    tensors = {k: t for k, t in tensors.items() if not k.startswith(f"{_STATISTICS}/")}
    wanted = json.loads(json.dumps(dataclasses.asdict(spec)))
    if other := [name for name in wanted if header["model"].get(name) != wanted[name]]:
        raise FLError(
            f"{folder / FILE} holds another model: {other[0]} was {header['model'].get(other[0])}, the settings now "
            f"mean {wanted[other[0]]}; start a new run"
        )
    try:
        check_same(flatten(like), tensors, "this run", "the checkpoint")
    except SurgeryError as error:
        raise FLError(f"{folder / FILE} holds another model: {error}") from None
    server = {
        part: {name: tensors[f"{part}/{name}"].to(value) for name, value in state.items()}
        for part, state in like.items()
    }
    return server, header["round"]


def read_model(folder: Path, model: Model | None = None) -> tuple[Spec, State]:
    """(spec, state) of the global model of a run folder, with the statistics of static batch norms.

    Args:
        model: the user's model, if it was given from Python.
    """
    spec, parts = read_parts(folder, model)
    return spec, parts["global"] | parts.get(_STATISTICS, {})


def read_parts(folder: Path, model: Model | None = None) -> tuple[Spec, dict[str, State]]:
    """(spec of the model, everything the server kept, by part) of a run folder."""
    tensors, header = _read(folder)
    try:
        return spec_of(folder, header["model"], model), unflatten(tensors)
    except zoo.ZooError as error:
        raise FLError(f"{folder / FILE} describes no model: {error}") from None


def flatten(server: Server) -> dict[str, Tensor]:
    """All tensors of a server under `part/name`."""
    return {f"{part}/{name}": tensor for part, state in server.items() for name, tensor in state.items()}


def unflatten(tensors: dict[str, Tensor]) -> dict[str, State]:
    """The inverse of `flatten`.

    >>> import torch
    >>> unflatten({"a/b/c": torch.ones(1)})
    {'a': {'b/c': tensor([1.])}}
    """
    parts: dict[str, State] = {}
    for key, tensor in tensors.items():
        part, name = key.split("/", 1)
        parts.setdefault(part, {})[name] = tensor
    return parts


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
        found = header.get("format")
        raise FLError(f"{path} is no checkpoint of format {_FORMAT} but {found}: another version wrote it; train again")
    return tensors, json.loads(header["state"])
