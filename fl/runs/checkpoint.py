"""What a run needs to continue: the server's tensors and, in the same file, their round."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialise
from torch import Tensor

import zoo
from fl.algorithms.algorithm import Server
from fl.base.errors import FLError
from fl.base.files import regular, replacing
from fl.models.own import Model
from fl.runs.checksums import damage, ordered, record
from fl.runs.given import spec_of
from surgery import State, SurgeryError, check_same
from surgery.transfer import host_copies
from zoo import Spec

FILE = "checkpoint.safetensors"
_FORMAT = "2"
_STATISTICS = "statistics"  # stored beside the parts of the server


def save(
    folder: Path,
    server: Server,
    round: int,
    spec: Spec,
    statistics: State,
    settings: Mapping[str, Any] | None = None,
    file: str = FILE,
    beside: Mapping[str, Any] | None = None,
    backends: Mapping[str, str] | None = None,
) -> None:
    """Write the checkpoint of a run folder atomically: a reader finds either the old one or the new one, complete.

    It is one safetensors file with tensors named `part/tensor` and JSON in its header, so that tensors and round always
    belong together, which two files would not ensure. The header also has a checksum of every tensor. The same content
    is the same file, byte for byte.

    Args:
        spec: of the model.
        statistics: of the global model's static batch norms, if it has any.
        settings: those that the run must keep, see `fl.runs.fixed_settings`.
        file: its name in the folder.
        beside: by name, the checksums of other files of the folder, which belong to this checkpoint.
        backends: what --backend auto has chosen.
    """
    # Copies, since parts may share memory (one model broadcast to all), which safetensors refuses.
    if _STATISTICS in server:
        raise FLError(f"a server has no part called {_STATISTICS!r}: that is where checkpoints keep static norms'")
    parts = flatten({**server, _STATISTICS: statistics})
    tensors = dict(zip(parts, host_copies(list(parts.values()))))
    state = json.dumps(
        {
            "round": round,
            "model": dataclasses.asdict(spec),
            "settings": dict(settings or {}),
            "beside": dict(beside or {}),
            "backends": dict(sorted((backends or {}).items())),
        }
    )
    header = {"format": _FORMAT, "state": state, "checksums": record(tensors, state)}
    with replacing(folder / file) as temporary, open(temporary, "wb") as opened:  # save_file makes private files
        opened.writelines(ordered(serialise(tensors, metadata=header)))


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
    expected = flatten(like)
    try:
        check_same(expected, tensors, "this run", "the checkpoint")
    except SurgeryError as error:
        raise FLError(f"{folder / FILE} holds another model: {error}") from None
    for name, tensor in expected.items():
        if tensors[name].dtype != tensor.dtype:
            raise FLError(
                f"{folder / FILE} holds another model: {name} is {tensors[name].dtype} there, and {tensor.dtype} in "
                "this run; start a new run"
            )
    server = {
        part: {name: tensors[f"{part}/{name}"].to(value) for name, value in state.items()}
        for part, state in like.items()
    }
    return server, header["round"]


def read_model(folder: Path, file: str = FILE, model: Model | None = None) -> tuple[Spec, State]:
    """(spec, state) of the global model of a run folder, with the statistics of static batch norms.

    Args:
        file: its name in the folder.
        model: the user's model, if it was given from Python.
    """
    spec, parts = read_parts(folder, file, model)
    if "global" not in parts:
        raise FLError(f"{folder / file} holds no global model: put back a copy of the file, or train again")
    return spec, parts["global"] | parts.get(_STATISTICS, {})


def read_parts(folder: Path, file: str = FILE, model: Model | None = None) -> tuple[Spec, dict[str, State]]:
    """(spec of the model, everything the server kept, by part) of a run folder."""
    tensors, header = _read(folder, file)
    try:
        return spec_of(folder, header["model"], model), unflatten(tensors)
    except (zoo.ZooError, TypeError) as error:  # a header without the model's name raises the latter
        raise FLError(f"{folder / file} describes no model: {error}") from None


def read_header(folder: Path) -> dict[str, Any]:
    """What a checkpoint remembers beside its tensors: the round, the settings and checksums of the files beside it.

    Earlier versions wrote no settings or no such checksums: these are then empty.
    """
    try:
        with safe_open(regular(folder / FILE, most=None), framework="pt") as file:
            return _state(folder / FILE, file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise FLError(f"{folder / FILE} cannot be read: {error}") from None


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


def _read(folder: Path, file: str = FILE) -> tuple[dict[str, Tensor], dict[str, Any]]:
    path = folder / file
    try:
        with safe_open(regular(path, most=None), framework="pt") as opened:
            header = opened.metadata() or {}
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118 (no mapping)
    except FileNotFoundError:
        raise FLError(f"{folder} has no {file}") from None
    except (SafetensorError, OSError) as error:
        raise FLError(f"{path} cannot be read: {error}") from None
    state = _state(path, header)
    wrong = damage(tensors, header["state"], header["checksums"]) if "checksums" in header else ""
    if not wrong and not all("/" in name for name in tensors):
        wrong = "it has tensors that belong to no part of a server"
    if wrong:
        raise _damaged(path, wrong)
    return tensors, state


def _state(path: Path, header: Mapping[str, str]) -> dict[str, Any]:
    """The round, the model and the settings in the header of a file."""
    if (found := header.get("format")) != _FORMAT:
        what = f"of format {found}, which another version of this program wrote" if found else "no checkpoint of a run"
        raise FLError(f"{path} is {what}, and this version reads format {_FORMAT}: train again")
    try:
        state = json.loads(header["state"])
        state = {"settings": {}, "beside": {}, "backends": {}} | state  # which earlier versions did not write
    except (KeyError, TypeError, ValueError):
        raise _damaged(path, "its header does not say which round and model it is of") from None
    if type(state.get("round")) is not int or state["round"] < 0:
        raise _damaged(path, f"its header says round {state.get('round')!r}")
    if not all(isinstance(state.get(part), dict) for part in ("model", "settings", "beside", "backends")):
        raise _damaged(path, "its header describes no model")
    return state


def _damaged(path: Path, how: str) -> FLError:
    return FLError(f"{path} is damaged ({how}): put back a copy of the file, or start a new run under another --name")
