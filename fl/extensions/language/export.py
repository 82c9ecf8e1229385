"""Trained models for transformers and for peft."""

from pathlib import Path

from torch import nn

from fl.base.errors import FLError, code_of
from fl.base.files import writing
from fl.engine.constants import as_parameters
from fl.extensions.language.sources import HFModel
from fl.models.custom_model import LIBRARIES
from fl.runs.export import Format, ModelOrigin
from fl.runs.folder import load_initial_weights
from fl.settings import Config
from surgery import SurgeryError, adapters
from surgery.files.whole import in_one_step
from surgery.torch_private import BatchNorm


def _write_hf(net: nn.Module, path: Path, origin: ModelOrigin) -> None:
    """Write a folder that `from_pretrained` loads."""
    if not isinstance(net, HFModel):
        raise FLError(
            f"{path}: a folder is for models of transformers (--model hf:FOLDER), and this is a "
            f"{type(net).__name__}: name the file .pt or .safetensors"
        )
    with writing(path), in_one_step(path, folder=True) as temporary:
        net.save(temporary)


def _write_peft(net: nn.Module, path: Path, origin: ModelOrigin) -> None:
    """Write a folder with the adapters alone."""
    inner, settings = net.model if isinstance(net, HFModel) else net, _base(net, origin)
    try:
        with writing(path):
            adapters.write_peft(as_parameters(inner), path, **settings)
    except SurgeryError as error:
        raise FLError(f"{path}: {error}", code=code_of(error)) from None


def _base(net: nn.Module, origin: ModelOrigin) -> dict[str, str | None]:
    """Return peft's settings of the base of a run's adapters: its name, or nothing.

    A model that was given from Python says it itself.

    Raises FLError unless the model is its adapters on a base that others have.
    """
    if origin.folder is None:
        return {}
    folder, custom, config = origin.folder, origin.own, Config.read(origin.folder)
    way = "or give another format, which has all of the model"
    if not any(adapters.adapted_layers(net)):
        raise FLError(
            f"{folder} has no adapters (--adapters.kind lora), which peft's files are made of", code="unsupported"
        )
    if any(name.endswith("base_layer.weight") for name, _ in net.named_parameters()):
        raise FLError(
            f"{folder}: {config.method.name} has changed the base as well: give another format", code="unsupported"
        )
    trained, start, random_names, name = adapters.state(net), load_initial_weights(folder, config), (), None
    kind = config.model.name.partition(":")[0] if ":" in config.model.name else "zoo"
    if isinstance(net, HFModel):
        if config.model.depth or set(config.model.width) != {1.0}:
            raise FLError(
                f"{folder}: --width or --depth has cut the base, and {net.folder} is another: give another format",
                code="unsupported",
            )
        random_names, name = [f"model.{tensor}" for tensor in net.drawn], str(net.folder)
    if start:
        random_names, name = start.left, None
    elif not custom and kind in ("zoo", "hf-config", *LIBRARIES):
        random_names = ["all of it"]
    if lacking := [tensor for tensor in random_names if tensor not in trained]:
        raise FLError(
            f"{folder}: the base is random ({lacking[0]}), and only this run has it: begin with --init, train the "
            f"whole layer (--adapters.train), {way}",
            code="unsupported",
        )
    for norm, module in net.named_modules():
        if isinstance(module, BatchNorm) and module.track_running_stats and f"{norm}.running_mean" not in trained:
            raise FLError(
                f"{folder}: the statistics of {norm} have moved, and adapters do not have them: train it whole "
                f"(--adapters.train), {way}",
                code="unsupported",
            )
    return {} if custom and not start else {"base_model_name_or_path": name}


FORMATS = {"hf": Format(_write_hf, usual=True), "peft": Format(_write_peft, folded=False)}
