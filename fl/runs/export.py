"""Export of the trained model of a run, as one file for programs that do not know this project."""

import copy
import io
import logging
import os
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import save as serialise
from torch import Tensor, nn

from fl.base.errors import FLError
from fl.base.files import replacing
from fl.data import Dataset
from fl.models.custom_model import Model
from fl.runs import checkpoint
from fl.runs.folder import load_model
from fl.runs.run import Run
from fl.settings import Config
from surgery.errors import first_line
from surgery.transfer import host_copies


class OfPixels(nn.Module):
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
        format: pt (a state dict, for `torch.load`), safetensors (the same), pt2 (the program, for `torch.export.load`)
            or onnx (needs the extra `onnx`).
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
    kind = format or path.suffix.removeprefix(".")
    if kind not in _WRITERS:
        raise FLError(
            f"{path}: unknown format {kind!r}: there are {', '.join(_WRITERS)}; name the file so, or give one"
        )
    if not path.parent.is_dir():
        raise FLError(f"{path}: there is no folder {path.parent}")
    plain = kind in ("pt", "safetensors")
    if pixels and plain:
        raise FLError(f"a state dict ({kind}) holds weights alone: --pixels is for pt2 and onnx")
    if kind == "onnx" and not all(map(find_spec, ("onnx", "onnxscript"))):
        raise FLError("onnx needs a package that is missing: pip install 'layer-surgery[onnx]'")
    if isinstance(trained, nn.Module):
        if client is not None or best or pixels or model is not None or dataset is not None:
            raise FLError(
                "client, best, pixels, model and dataset are for a run folder, and a module was given: leave them out"
            )
        net = copy.deepcopy(trained).cpu()
    else:
        folder = Path(trained)
        net = _of_run(folder, client, best, model, dataset)
        if example is None and not plain:
            example = checkpoint.read_parts(folder, model=model)[0].example(2)
        if pixels:
            data = Config.read(folder).load() if dataset is None else _built(folder, model, dataset).fed.data
            net, example = OfPixels(net, data), example.to(torch.uint8)
    if example is None and not plain:
        raise FLError(f"to write {kind} the model runs once: give an input of two samples as `example`")
    if os.path.lexists(path):  # a link that leads nowhere, too
        raise FLError(f"{path} exists already: give another file")
    content = _WRITERS[kind](net.eval(), example)
    with replacing(path) as temporary:
        temporary.write_bytes(content)
    return path


def _of_run(folder: Path, client: int | None, best: bool, model: Model | None, dataset: Dataset | None) -> nn.Module:
    """Load the model of a run folder."""
    if client is None:
        return load_model(folder, model, best=best)
    if best:
        raise FLError("--best is for the deployed model: leave it out, or --client")
    return client_model(folder, client, model, dataset)


def client_model(folder: Path, client: int, model: Model | None = None, dataset: Dataset | None = None) -> nn.Module:
    """Load the model that a client of a run predicts with, on the CPU, in evaluation mode. The run's data set is
    needed.

    Args:
        model, dataset: those of your own that the run was given, if it was.

    Raises FLError if it predicts with none, or with the sum of several, and for a model or data of another run.
    """
    run = _built(folder, model, dataset)
    fed = run.fed
    if not 0 <= client < len(fed.clients):
        raise FLError(f"--client {client}: {folder} has clients 0 to {len(fed.clients) - 1}")
    used = [level for level in run.algorithm.client_models(run.server).levels if level.used[client] >= 0]
    if len(used) != 1:
        raise FLError(
            f"--client {client}: in {run.config.algorithm[0]} it predicts with {len(used)} models, whose logits are "
            "added up: use fl.Pathways.load(folder), or leave --client out"
        )
    k = int(used[0].used[client])
    module = fed.model if used[0].modules is None else used[0].modules[k]
    state = used[0].state(k)
    net = copy.deepcopy(module)
    net.load_state_dict({**state, **fed.statistics(state, module)})
    return net.eval()


def _built(folder: Path, model: Model | None, dataset: Dataset | None) -> Run:
    """Rebuild a run as its checkpoint has it, on the CPU; FLError for a model or data of another run."""
    checkpoint.read_header(folder)  # without one there is nothing that was trained
    return Run.prepare(replace(Config.read(folder), device="cpu"), folder, True, dataset, model)


def _state(net: nn.Module) -> dict[str, Tensor]:
    values = net.state_dict()
    return dict(zip(values, host_copies(list(values.values()))))


def _pt(net: nn.Module, example: Tensor | None) -> bytes:
    buffer = io.BytesIO()
    torch.save(_state(net), buffer)
    return buffer.getvalue()


def _safetensors(net: nn.Module, example: Tensor | None) -> bytes:
    return serialise(_state(net), metadata={"format": "pt"})


def _pt2(net: nn.Module, example: Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(_program(net, example), buffer)
    return buffer.getvalue()


def _onnx(net: nn.Module, example: Tensor) -> bytes:
    program = _program(net, example)
    made = _quietly("onnx", net, lambda: torch.onnx.export(program, dynamo=True, verbose=False))
    return made.model_proto.SerializeToString()


def _program(net: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """Trace the model as a program for any number of samples."""
    shapes = ({0: torch.export.Dim("batch")},)
    with torch.no_grad():
        return _quietly("a program", net, lambda: torch.export.export(net, (example,), dynamic_shapes=shapes))


def _quietly(what: str, net: nn.Module, make: Callable):
    """Call `make` without its warnings; an error names the model."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(action="ignore"):
            return make()
    except Exception as error:  # of the many passes of a compiler
        raise FLError(
            f"{type(net).__name__} cannot be written as {what}: {first_line(error)}; pt and safetensors hold weights"
        ) from None
    finally:
        logging.disable(level)


_WRITERS: dict[str, Callable[[nn.Module, Tensor | None], bytes]] = {
    "pt": _pt,
    "safetensors": _safetensors,
    "pt2": _pt2,
    "onnx": _onnx,
}
"""From a format to what makes the content of a file: (module, an input) -> bytes."""
