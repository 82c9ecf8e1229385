"""Export of the weights of a trained model, as one file or folder for programs that do not know this project."""

import copy
import io
import os
from pathlib import Path

import torch
from safetensors.torch import save as serialise
from torch import nn

from fl.algorithms.algorithm import Algorithm, Server
from fl.base.errors import FLError
from fl.base.files import replacing, writing
from fl.data import Dataset
from fl.engine.constants import as_parameters
from fl.federation import Federation
from fl.models.adapted import folded
from fl.models.custom_model import LIBRARIES, Model, as_given
from fl.models.hf import HFModel
from fl.runs import checkpoint
from fl.runs.folder import is_last_best, load_initial_weights, load_with_adapters
from fl.runs.state import RunState
from fl.settings import Config
from surgery import State, SurgeryError, adapters
from surgery.files.whole import in_one_step
from surgery.torch_private import BatchNorm
from surgery.transfer import host_copies

_FORMATS = ("pt", "safetensors", "hf", "peft")


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
        trained: a run folder, whose deployed model it is (see `fl.load_model`), or a module.
        file: the new file. Its suffix says the format, unless `format` does.
        model: the model of your own that the run was given, if it was, as in `fl.load_model`.
        dataset: the data of your own that the run was given, if it was, as in `fl.build`; needed for `client`.
        format: pt (a state dict, for `torch.load`), safetensors (the same); hf: a folder that transformers'
            `from_pretrained` loads, of a model that came from it; a name without a suffix is such a folder; or peft: a
            folder with the adapters alone, which `PeftModel.from_pretrained` puts on the base.
        client: the model that this client of the run predicts with, in the place of the deployed one; the run's data
            set is needed.
        best: that of the best evaluated round, for a run with --keep-best.

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
    kind = _format_of(path, format)
    if not isinstance(trained, nn.Module):
        net = _from_run(Path(trained), kind, model, dataset, client, best)
    elif client is not None or best or model is not None or dataset is not None:
        raise FLError("client, best, model and dataset are for a run folder, and a module was given: leave them out")
    else:
        net = copy.deepcopy(trained).cpu()
    if os.path.lexists(path):  # a link that leads nowhere, too
        raise FLError(f"{path} exists already: give another file")
    if kind == "peft":
        base = {} if isinstance(trained, nn.Module) else _base(Path(trained), net, model is not None)
        _write_adapters(net, path, base)
        return path
    if kind == "hf":
        if not isinstance(net, HFModel):
            raise FLError(
                f"{path}: a folder is for models of transformers (--model hf:FOLDER), and this is a "
                f"{type(net).__name__}: name the file .pt or .safetensors"
            )
        with writing(path), in_one_step(path, folder=True) as temporary:
            net.save(temporary)
        return path
    content = _content(kind, net)
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return path


def _format_of(path: Path, asked: str | None) -> str:
    """Return the format of a file. Raises FLError for one that cannot be written."""
    kind = asked or path.suffix.removeprefix(".") or "hf"
    if kind not in _FORMATS:
        raise FLError(
            f"{path}: unknown format {kind!r}: there are {', '.join(_FORMATS)}; name the file so, or give one (hf and "
            "peft are folders)"
        )
    if not path.parent.is_dir():
        raise FLError(f"{path}: there is no folder {path.parent}")
    return kind


def _from_run(
    folder: Path, kind: str, model: Model | None, dataset: Dataset | None, client: int | None, best: bool
) -> nn.Module:
    """Return the model of a run, with adapters beside it for peft alone."""
    if client is None:
        net = load_with_adapters(folder, model, best=best)
    else:
        net = client_model(folder, client, model, dataset, best=best)
    return net if kind == "peft" else folded(net)


def _write_adapters(net: nn.Module, path: Path, settings: dict[str, str | None]) -> None:
    inner = net.model if isinstance(net, HFModel) else net
    try:
        with writing(path):
            adapters.write_peft(as_parameters(inner), path, **settings)
    except SurgeryError as error:
        raise FLError(f"{path}: {error}") from None


def _base(folder: Path, net: nn.Module, own: bool) -> dict[str, str | None]:
    """Return what peft's settings say of the base that the adapters of a run belong to: its name, or that it has none.

    A model that was given from Python says it itself.

    Args:
        own: whether the model was given from Python.

    Raises FLError unless the model is its adapters on a base that others have.
    """
    config = Config.read(folder)
    way = "or give another format, which has all of the model"
    if not any(adapters.adapted_layers(net)):
        raise FLError(f"{folder} has no adapters (--adapters.kind lora), which peft's files are made of")
    if any(name.endswith("base_layer.weight") for name, _ in net.named_parameters()):
        raise FLError(f"{folder}: {config.method.name} has changed the base as well: give another format")
    trained, start, drawn, name = adapters.state(net), load_initial_weights(folder, config), (), None
    kind = config.model.name.partition(":")[0] if ":" in config.model.name else "zoo"
    if isinstance(net, HFModel):
        if config.model.depth or set(config.model.width) != {1.0}:
            raise FLError(
                f"{folder}: --width or --depth has cut the base, and {net.folder} is another: give another format"
            )
        drawn, name = [f"model.{one}" for one in net.drawn], str(net.folder)
    if start:
        drawn, name = start.left, None
    elif not own and kind in ("zoo", "hf-config", *LIBRARIES):
        drawn = ["all of it"]
    if lacking := [one for one in drawn if one not in trained]:
        raise FLError(
            f"{folder}: the base was drawn ({lacking[0]}), and nobody else has it: begin with --init, train the layer "
            f"whole (--adapters.train), {way}"
        )
    for norm, module in net.named_modules():
        if isinstance(module, BatchNorm) and module.track_running_stats and f"{norm}.running_mean" not in trained:
            raise FLError(
                f"{folder}: the statistics of {norm} have moved, and adapters do not have them: train it whole "
                f"(--adapters.train), {way}"
            )
    return {} if own and not start else {"base_model_name_or_path": name}


def client_model(
    folder: Path, client: int, model: Model | None = None, dataset: Dataset | None = None, *, best: bool = False
) -> nn.Module:
    """Load the model that a client of a run predicts with, on the CPU, in evaluation mode, with its adapters.

    The run's data set is needed.

    Args:
        model, dataset: those of your own that the run was given, if it was.
        best: that of the best evaluated round, for a run with --keep-best.

    Raises FLError if it predicts with none, or with the sum of several, for a model or data of another run, and if
    the run has not kept that of its best round.
    """
    run = _built(folder, model, dataset)
    fed, server = run.fed, run.server
    if best and not is_last_best(folder):
        parts = checkpoint.read_best(folder).parts
        deployed = not (run.algorithm.models or run.algorithm.personalize)  # which all clients predict with
        if not deployed and (lacking := [part for part, state in server.items() if state and part not in parts]):
            raise FLError(
                f"{folder} has stored the deployed model of its best round, and not {', '.join(lacking)}, which its "
                "clients predict with: leave --best or --client out"
            )
        server = {part: parts.get(part, {}) for part in server}
    return client_module(fed, run.algorithm, server, client)


def client_module(fed: Federation, algorithm: Algorithm, server: Server, client: int) -> nn.Module:
    """Return a module with the model that a client predicts with, in evaluation mode, with its adapters.

    Raises FLError if there is no such client, or it predicts with none, or with the sum of several.
    """
    if not 0 <= client < len(fed.clients):
        raise FLError(f"client {client}: there are clients 0 to {len(fed.clients) - 1}")
    used = [level for level in algorithm.client_models(server).levels if level.used[client] >= 0]
    if len(used) != 1:
        raise FLError(
            f"client {client} predicts with {len(used)} models, whose logits are added up: use "
            "fl.Pathways.load(folder), or take the deployed model"
        )
    k = int(used[0].used[client])
    return module_with(fed, used[0].state(k), None if used[0].modules is None else used[0].modules[k])


def module_with(fed: Federation, state: State, module: nn.Module | None = None) -> nn.Module:
    """Return a copy of the federation's model, or of another architecture, with a state, in evaluation mode."""
    module = fed.model if module is None else module
    net = copy.deepcopy(module)
    net.load_state_dict({**state, **fed.statistics(state, module)})
    return as_given(net.eval())


def _built(folder: Path, model: Model | None, dataset: Dataset | None) -> RunState:
    """Rebuild a run as its checkpoint has it, on the CPU; FLError for a model or data of another run."""
    checkpoint.read_header(folder)  # without one there is nothing that was trained
    return RunState.prepare(Config.read(folder).replace(device="cpu"), folder, True, dataset, model)


def _content(kind: str, net: nn.Module) -> bytes:
    """Return the bytes of a file with a state dict."""
    values = net.state_dict()
    values = dict(zip(values, host_copies(list(values.values()))))
    if kind == "safetensors":
        return serialise(values, metadata={"format": "pt"})
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()
