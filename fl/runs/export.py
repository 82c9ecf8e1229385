"""Export of trained weights, for programs that do not know this project."""

import copy
import io
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save as serialise
from torch import nn

from fl.algorithms.algorithm import Algorithm, Server
from fl.base.errors import FLError
from fl.base.files import replacing
from fl.base.plugins import collect
from fl.data import Dataset
from fl.federation import Federation
from fl.models.custom_model import Model, as_given
from fl.runs import checkpoint
from fl.runs.folder import fold_model, is_last_best, load_as_trained
from fl.runs.state import RunState
from fl.settings import Config
from surgery import State
from surgery.transfer import host_copies


class ModelOrigin(NamedTuple):
    """The origin of a model that is written.

    Attributes:
        folder: of the run; None for a module that was given. own: whether the run's model was given from Python.
    """

    folder: Path | None = None
    own: bool = False


@dataclass(frozen=True)
class Format:
    """A format of a written model.

    A file `export.py` of a folder in `fl.extensions` names some in `FORMATS`.

    Attributes:
        write: (model, new path, origin) -> writes it, whole or not at all.
        suffix: whether a file's suffix asks for it; otherwise it is a folder.
        usual: whether a name without a suffix asks for it.
        folded: whether the model has its own parameters alone, in which adapters are folded.
    """

    write: Callable[[nn.Module, Path, ModelOrigin], None]
    suffix: bool = False
    usual: bool = False
    folded: bool = True


def export_model(
    trained: nn.Module | str | Path,
    file: str | Path,
    *,
    model: Model | None = None,
    dataset: Dataset | None = None,
    format: str | None = None,
    client: int | None = None,
    best: bool = False,
) -> Path:
    """Write the weights of a trained model into a new file, and return its path.

    The model takes what it takes in training: images normalised to [-1, 1], or tokens. Its program, beside its
    weights, is written by `torch.export.export(fl.load_model(folder), (x,))`.

    Args:
        trained: a run folder, for its deployed model (see `fl.load_model`), or a module.
        file: the new file. Its suffix says the format, unless `format` does.
        model: the model of your own that the run was given, if it was, as in `fl.load_model`.
        dataset: the data of your own that the run was given, if it was, as in `fl.build`; needed for `client`.
        format: pt (a state dict, for `torch.load`), safetensors (the same); hf: a folder that transformers'
            `from_pretrained` loads, of a model that came from it; a name without a suffix is such a folder; or peft: a
            folder with the adapters alone, which `PeftModel.from_pretrained` puts on the model that they are for.
        client: the model that this client of the run predicts with, in the place of the deployed one; the run's data
            set is needed.
        best: take the best evaluated round's model, of a run with --keep-best.

    Raises:
        FLError: for an unknown format, a file that exists, a model that cannot be written in this format, and a client
            that predicts with several models.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = export_model(nn.Linear(2, 1), f"{folder}/model.pt")
    ...     list(torch.load(path))
    ['weight', 'bias']
    """
    path = Path(file)
    target = _format_of(path, format)
    if not isinstance(trained, nn.Module):
        net = _from_run(Path(trained), target.folded, model, dataset, client, best)
    elif client is not None or best or model is not None or dataset is not None:
        raise FLError("client, best, model and dataset are for a run folder, and a module was given: leave them out")
    else:
        net = copy.deepcopy(trained).cpu()
    if os.path.lexists(path):  # a link that leads nowhere, too
        raise FLError(f"{path} exists already: give another file", code="file")
    target.write(
        net, path, ModelOrigin() if isinstance(trained, nn.Module) else ModelOrigin(Path(trained), model is not None)
    )
    return path


def _format_of(path: Path, wanted: str | None) -> Format:
    """Return the format of a file. Raises FLError for one that cannot be written."""
    formats = collect("fl.runs.export", "FORMATS", Format)
    folders = [name for name, candidate in formats.items() if not candidate.suffix]
    usual = next((name for name, candidate in formats.items() if candidate.usual), "")
    kind = wanted or path.suffix.removeprefix(".") or usual
    if kind not in formats:
        problem = f"unknown format {kind!r}" if kind else "its name has no suffix"
        also = f" ({' and '.join(folders)} are folders)" * bool(folders)
        raise FLError(f"{path}: {problem}: there are {', '.join(formats)}; name the file so, or give one{also}")
    if not path.parent.is_dir():
        raise FLError(f"{path}: there is no folder {path.parent}", code="file")
    return formats[kind]


def _from_run(
    folder: Path, whole: bool, model: Model | None, dataset: Dataset | None, client: int | None, best: bool
) -> nn.Module:
    """Return the model of a run, with its own parameters alone or as it was trained."""
    if client is None:
        net = load_as_trained(folder, model, best=best)
    else:
        net = client_model(folder, client, model, dataset, best=best)
    return fold_model(Config.read(folder), net) if whole else net


def client_model(
    folder: Path, client: int, model: Model | None = None, dataset: Dataset | None = None, *, best: bool = False
) -> nn.Module:
    """Load the model that a client of a run predicts with, as it was trained.

    It is on the CPU, in evaluation mode. The run's data set is needed.

    Args:
        model, dataset: yours, if the run was given one.
        best: take the best evaluated round's model, of a run with --keep-best.

    Raises FLError if it predicts with none, or with the sum of several, for a model or data of another run, and if
    the run has not stored its best round's model.
    """
    checkpoint.read_header(folder)  # without one there is nothing that was trained
    run = RunState.prepare(Config.read(folder).replace(device="cpu"), folder, True, dataset, model)
    fed, server = run.fed, run.server
    if best and not is_last_best(folder):
        parts = checkpoint.read_best(folder).parts
        deployed = not (run.algorithm.models or run.algorithm.personalize)  # which all clients predict with
        if not deployed and (lacking := [part for part, state in server.items() if state and part not in parts]):
            raise FLError(
                f"{folder} has stored the deployed model of its best round, and not {', '.join(lacking)}, which its "
                "clients predict with: leave --best or --client out",
                code="folder",
            )
        server = {part: parts.get(part, {}) for part in server}
    return client_module(fed, run.algorithm, server, client)


def client_module(fed: Federation, algorithm: Algorithm, server: Server, client: int) -> nn.Module:
    """Return a module with a client's model, in evaluation mode, as it was trained.

    Raises FLError if there is no such client, or it predicts with none, or with the sum of several.
    """
    if not 0 <= client < len(fed.clients):
        raise FLError(f"client {client}: there are clients 0 to {len(fed.clients) - 1}")
    used = [level for level in algorithm.client_models(server).levels if level.used[client] >= 0]
    if len(used) != 1:
        raise FLError(
            f"client {client} predicts with {len(used)} models, whose logits are added up: use "
            "fl.Pathways.load(folder), or take the deployed model",
            code="unsupported",
        )
    k = int(used[0].used[client])
    return module_with(fed, used[0].state(k), None if used[0].modules is None else used[0].modules[k])


def module_with(fed: Federation, state: State, module: nn.Module | None = None) -> nn.Module:
    """Return a copy of an architecture of the federation with a state, to evaluate."""
    module = fed.model if module is None else module
    net = copy.deepcopy(module)
    net.load_state_dict({**state, **fed.statistics(state, module)})
    return as_given(net.eval())


def _write_file(path: Path, net: nn.Module, content: Callable[[State], bytes]) -> None:
    values = net.state_dict()
    data = content(dict(zip(values, host_copies(list(values.values())))))
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def _as_torch(values: State) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


FORMATS = {
    "pt": Format(lambda net, path, origin: _write_file(path, net, _as_torch), suffix=True),
    "safetensors": Format(
        lambda net, path, origin: _write_file(path, net, partial(serialise, metadata={"format": "pt"})), suffix=True
    ),
}
"""State dicts: for `torch.load`, and of safetensors."""
