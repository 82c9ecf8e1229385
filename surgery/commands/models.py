"""The model that a command runs, where names and shapes of tensors do not suffice."""

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.commands.shared import value_of
from surgery.errors import SurgeryError, first_line

if TYPE_CHECKING:
    from torch import Tensor, nn

    from surgery.files import Checkpoint

_FORMS = "timm:NAME, torchvision:NAME, or module:factory of your own, each with arguments if needed (,num_classes=10)"


def build(name: str | None, checkpoint: "Checkpoint | None" = None) -> "nn.Module":
    """The model of a name, or the one that a HuggingFace folder's config.json describes; its weights are random.

    Args:
        name: timm:NAME, torchvision:NAME or MODULE:FACTORY, where modules are also looked for in the working directory;
            arguments of the factory may follow, `timm:resnet18,num_classes=10`.
        checkpoint: used if there is no name.

    Raises:
        SurgeryError: if there is no such model, or it cannot be built.
    """
    if name is None:
        return _described(checkpoint)
    called, *rest = name.split(",")
    arguments = {}
    for text in rest:
        key, equals, value = text.partition("=")
        if not equals or not key.strip().isidentifier():
            raise SurgeryError(f"--model {name}: write arguments as NAME=VALUE, such as num_classes=10")
        arguments[key.strip()] = value_of(value)
    module, _, factory = called.partition(":")
    if module in ("timm", "torchvision"):
        from surgery.libraries import named

        return named(called, **arguments)
    if not module or not factory:
        raise SurgeryError(f"--model {name}: give {_FORMS}")
    return _own(module, factory, arguments)


def _own(module: str, factory: str, arguments: Mapping[str, Any]) -> "nn.Module":
    from torch import nn

    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        made = getattr(importlib.import_module(module), factory)(**arguments)
    except Exception as error:  # whatever the user's code raises
        what = f"{type(error).__name__}: {first_line(error)}"
        raise SurgeryError(f"--model {module}:{factory} cannot be built: {what}") from error
    if not isinstance(made, nn.Module):
        raise SurgeryError(
            f"--model {module}:{factory} gives a {type(made).__name__}, and should give a torch.nn.Module"
        )
    return made


def _described(checkpoint: "Checkpoint | None") -> "nn.Module":
    file = checkpoint.path / "config.json" if checkpoint is not None and checkpoint.is_folder else None
    if file is None or not file.is_file():
        raise SurgeryError(f"this needs the model, of which the checkpoint holds tensors only: give --model {_FORMS}")
    try:
        import transformers

        names = json.loads(file.read_text())["architectures"]
        config = transformers.AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
        return getattr(transformers, names[0])(config)
    except ImportError:
        raise SurgeryError(f"{file} describes a model of transformers, which is not installed: give --model") from None
    except Exception as error:  # transformers' own, of all kinds
        raise SurgeryError(f"{file} describes no model that can be built ({first_line(error)}): give --model") from None


def state_for(model: "nn.Module", checkpoint: "Checkpoint") -> "Mapping[str, Tensor]":
    """The checkpoint under the names of `surgery.state(model)`; of tied tensors the first name that is there is taken.

    Raises:
        SurgeryError: if a tensor of the model is missing, or one of the checkpoint unknown.
    """
    from surgery.lazy import LazyState
    from surgery.states import state

    own = {tensor.data_ptr() if tensor.numel() else id(tensor): name for name, tensor in state(model).items()}
    places = {name: name for name in state(model)}
    for name, tensor in model.state_dict().items():
        if (
            name not in places
            and (first := own.get(tensor.data_ptr()))
            and first not in checkpoint
            and name in checkpoint
        ):
            places[first] = name
    tied = set(model.state_dict())
    if missing := [name for name, place in places.items() if place not in checkpoint]:
        raise SurgeryError(f"{checkpoint.path} has no {missing[0]!r} ({len(missing)} missing), which the model has")
    if extra := [name for name in checkpoint if name not in places.values() and name not in tied]:
        raise SurgeryError(f"{checkpoint.path} has {extra[0]!r} ({len(extra)} unknown), which the model has not")
    return LazyState({name: checkpoint.pieces(place) for name, place in places.items()})


def config_of(model: "nn.Module") -> dict | None:
    """The configuration of a model of transformers, for config.json."""
    config = getattr(model, "config", None)
    text = getattr(config, "to_json_string", None)
    return json.loads(text()) if callable(text) else None
