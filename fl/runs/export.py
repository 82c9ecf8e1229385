"""Export of the trained model of a run, as one file or folder for programs that do not know this project."""

import copy
import io
import logging
import os
import warnings
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save as serialise
from torch import Tensor, nn

from fl.algorithms.algorithm import Algorithm, Server
from fl.base.errors import FLError
from fl.base.files import replacing, writing
from fl.data import Dataset
from fl.engine.constants import as_parameters
from fl.federation import Federation
from fl.models.adapted import folded
from fl.models.custom_model import LIBRARIES, Model
from fl.models.hf import HFModel
from fl.runs import checkpoint
from fl.runs.folder import is_last_best, load_initial_weights, load_with_adapters
from fl.runs.run import Run
from fl.settings import Config
from surgery import State, SurgeryError, adapters
from surgery.errors import first_line
from surgery.files.whole import in_one_step
from surgery.torch_private import BatchNorm
from surgery.transfer import host_copies

_PLAIN = ("pt", "safetensors")
_FORMATS = (*_PLAIN, "pt2", "onnx", "hf", "peft")
_WITHOUT_PROGRAM = {
    **dict.fromkeys(_PLAIN, "a state dict holds weights alone"),
    "hf": "a folder of transformers says itself how images are normalised",
    "peft": "a folder of peft holds adapters alone",
}
"""What a format holds into which no step of a program can be written."""


class _OfPixels(nn.Module):
    """A model that takes images as the data set holds them (uint8), and normalises them itself."""

    def __init__(self, model: nn.Module, data: Dataset) -> None:
        super().__init__()
        if data.x.dtype != torch.uint8 or data.x.ndim != 4:
            raise FLError(
                f"--pixels is for images of whole numbers, and {data.name} holds {data.x.dtype}: leave it out"
            )
        black, first = data.normalise(torch.tensor([0, 1], dtype=torch.uint8)).tolist()
        self.model, self.scale, self.shift = model, first - black, black

    def forward(self, images: Tensor) -> Tensor:
        """Logits [N, classes] of uint8 images [N, C, H, W]."""
        return self.model(images.float() * self.scale + self.shift)


def export(
    trained: nn.Module | str | Path,
    file: str | Path,
    *,
    model: Model | None = None,
    dataset: Dataset | None = None,
    format: str | None = None,
    example: Tensor | None = None,
    client: int | None = None,
    best: bool = False,
    pixels: bool = False,
) -> Path:
    """Write a trained model in evaluation mode into a new file, and return its path.

    The model takes what it takes in training: images normalised to [-1, 1], or tokens; any number of them at a time.

    Args:
        trained: a run folder, whose deployed model it is (see `fl.load_model`), or a module.
        file: the new file. Its suffix says the format, unless `format` does.
        model: the model of your own that the run was given, if it was, as in `fl.load_model`.
        dataset: the data of your own that the run was given, if it was, as in `fl.build`; needed for `client` and
            `pixels`.
        format: pt (a state dict, for `torch.load`), safetensors (the same), pt2 (the program, for `torch.export.load`),
            onnx (needs the extra `onnx`); hf: a folder that transformers' `from_pretrained` loads, of a model that came
            from it; a name without a suffix is such a folder; or peft: a folder with the adapters alone, which
            `PeftModel.from_pretrained` puts on the base.
        example: an input of two samples or more; needed for a module as pt2 or onnx.
        client: the model that this client of the run predicts with, in the place of the deployed one; the run's data
            set is needed.
        best: that of the best evaluated round, for a run with --keep-best.
        pixels: whether the model takes images as the data set holds them (uint8) and normalises them itself; for a run,
            as pt2 or onnx.

    Raises:
        FLError: for a format that is unknown or whose package is missing, a file that exists, a model that cannot be
            written in this format, and a client that predicts with several models.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = export(nn.Linear(2, 1), f"{folder}/model.pt")
    ...     list(torch.load(path))
    ['weight', 'bias']
    """
    path = Path(file)
    kind = _format_of(path, format, pixels)
    if not isinstance(trained, nn.Module):
        net, example = _from_run(Path(trained), kind, model, dataset, example, client, best, pixels)
    elif client is not None or best or pixels or model is not None or dataset is not None:
        raise FLError(
            "client, best, pixels, model and dataset are for a run folder, and a module was given: leave them out"
        )
    else:
        net = copy.deepcopy(trained).cpu()
    if example is None and kind in ("pt2", "onnx"):
        raise FLError(f"to write {kind} the model runs once: give an input of two samples as `example`")
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
                f"{type(net).__name__}: name the file .pt, .safetensors, .pt2 or .onnx"
            )
        with writing(path), in_one_step(path, folder=True) as temporary:
            net.save(temporary)
        return path
    content = _content(kind, net.eval(), example)
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return path


def _format_of(path: Path, asked: str | None, pixels: bool) -> str:
    """The format of a file. Raises FLError for one that cannot be written."""
    kind = asked or path.suffix.removeprefix(".") or "hf"
    if kind not in _FORMATS:
        raise FLError(
            f"{path}: unknown format {kind!r}: there are {', '.join(_FORMATS)}; name the file so, or give one (hf and "
            "peft are folders)"
        )
    if not path.parent.is_dir():
        raise FLError(f"{path}: there is no folder {path.parent}")
    if pixels and kind in _WITHOUT_PROGRAM:
        raise FLError(f"{_WITHOUT_PROGRAM[kind]}: --pixels is for pt2 and onnx")
    if kind == "onnx" and not all(map(find_spec, ("onnx", "onnxscript"))):
        raise FLError("onnx needs a package that is missing: pip install 'layer-surgery[onnx]'")
    return kind


def _from_run(
    folder: Path,
    kind: str,
    model: Model | None,
    dataset: Dataset | None,
    example: Tensor | None,
    client: int | None,
    best: bool,
    pixels: bool,
) -> tuple[nn.Module, Tensor | None]:
    """The model of a run, with adapters beside it for peft alone, and an input for it where the format needs one."""
    if client is None:
        net = load_with_adapters(folder, model, best=best)
    else:
        net = client_model(folder, client, model, dataset, best=best)
    if kind != "peft":
        net = folded(net)
    if example is None and kind in ("pt2", "onnx"):
        example = checkpoint.read_parts(folder, model=model)[0].example(2)
    if pixels:
        data = Config.read(folder).load() if dataset is None else _built(folder, model, dataset).fed.data
        net, example = _OfPixels(net, data), example.to(torch.uint8)
    return net, example


def _write_adapters(net: nn.Module, path: Path, settings: dict[str, str | None]) -> None:
    inner = net.model if isinstance(net, HFModel) else net
    try:
        with writing(path):
            adapters.write_peft(as_parameters(inner), path, **settings)
    except SurgeryError as error:
        raise FLError(f"{path}: {error}") from None


def _base(folder: Path, net: nn.Module, own: bool) -> dict[str, str | None]:
    """What peft's settings say of the base that the adapters of a run belong to: its name, or that it has none.

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
        raise FLError(f"{folder}: {config.algorithm[0]} has changed the base as well: give another format")
    trained, start, drawn, name = adapters.state(net), load_initial_weights(folder, config), (), None
    kind = config.model.partition(":")[0] if ":" in config.model else "zoo"
    if isinstance(net, HFModel):
        if config.depth or set(config.width) != {1.0}:
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
    """A module with the model that a client predicts with, in evaluation mode, with its adapters.

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
    """A copy of the federation's model, or of another architecture, with a state, in evaluation mode."""
    module = fed.model if module is None else module
    net = copy.deepcopy(module)
    net.load_state_dict({**state, **fed.statistics(state, module)})
    return net.eval()


def _built(folder: Path, model: Model | None, dataset: Dataset | None) -> Run:
    """Rebuild a run as its checkpoint has it, on the CPU; FLError for a model or data of another run."""
    checkpoint.read_header(folder)  # without one there is nothing that was trained
    return Run.prepare(replace(Config.read(folder), device="cpu"), folder, True, dataset, model)


def _content(kind: str, net: nn.Module, example: Tensor | None) -> bytes:
    """The bytes of a file in a format."""
    buffer = io.BytesIO()
    if kind in _PLAIN:
        values = net.state_dict()
        values = dict(zip(values, host_copies(list(values.values()))))
        if kind == "safetensors":
            return serialise(values, metadata={"format": "pt"})
        torch.save(values, buffer)
        return buffer.getvalue()
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"), torch.no_grad():
            shapes = ({0: torch.export.Dim("batch")},)  # any number of samples
            program = torch.export.export(net, (example,), dynamic_shapes=shapes)
            if kind == "onnx":
                return torch.onnx.export(program, dynamo=True, verbose=False).model_proto.SerializeToString()
            torch.export.save(program, buffer)
            return buffer.getvalue()
    except Exception as error:  # of the many passes of a compiler
        raise FLError(
            f"{type(net).__name__} cannot be written as {kind}: {first_line(error)}; pt and safetensors hold weights"
        ) from None
    finally:
        logging.disable(level)
