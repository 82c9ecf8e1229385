"""The model that an operation runs, where names and shapes of tensors do not suffice."""

import importlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surgery.errors import SurgeryError, first_line
from surgery.operations.texts import value_of

if TYPE_CHECKING:
    from torch import nn

    from surgery.files import Checkpoint
    from surgery.lazy import LazyState

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
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SurgeryError(f"{file} is no JSON ({first_line(error)}): mend it, or fetch it again") from None
    try:
        import transformers

        names = found["architectures"]
        config = transformers.AutoConfig.from_pretrained(checkpoint.path, local_files_only=True)
        return getattr(transformers, names[0])(config)
    except ImportError:
        raise SurgeryError(f"{file} describes a model of transformers, which is not installed: give --model") from None
    except Exception as error:  # transformers' own, of all kinds
        raise SurgeryError(f"{file} describes no model that can be built ({first_line(error)}): give --model") from None


def state_for(model: "nn.Module", values: "LazyState", what: str) -> "LazyState":
    """The values under the names of `surgery.state(model)`; of tied tensors the first name that is there is taken.

    Raises:
        SurgeryError: that begins with `what`, if a tensor of the model is missing, or one of the values unknown.
    """
    from surgery.lazy import LazyState
    from surgery.states import state

    own = {tensor.data_ptr() if tensor.numel() else id(tensor): name for name, tensor in state(model).items()}
    places = {name: name for name in state(model)}
    tied = model.state_dict()
    for name, tensor in tied.items():
        first = own.get(tensor.data_ptr())
        if name not in places and first and first not in values and name in values:
            places[first] = name
    kind, way_out = type(model).__name__, "give the --model that it was saved from, with its arguments"
    if missing := [name for name, place in places.items() if place not in values]:
        many = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise SurgeryError(f"{what} has no {missing[0]!r}{many}, which {kind} has: {way_out}")
    if extra := [name for name in values if name not in places.values() and name not in tied]:
        many = f" and {len(extra) - 1} more tensors" if len(extra) > 1 else ""
        raise SurgeryError(f"{what} has {extra[0]!r}{many}, which {kind} does not have: {way_out}")
    return LazyState({name: values.pieces(place) for name, place in places.items()}, what)


def example_for(model: "nn.Module", shape: "Sequence[int] | None") -> Any:
    """An input of a model: zeros of the given shape (without the batch), tokens for models that begin with a table."""
    import torch
    from torch import nn

    from surgery.libraries import example_input
    from surgery.states import owners

    if getattr(model, "main_input_name", None) == "input_ids":
        return {"input_ids": torch.ones(2, *(shape or (8,)), dtype=torch.long)}
    first = next((module for _, module, _ in owners(model)), None)
    if isinstance(first, nn.Embedding) and len(shape or (8,)) == 1:
        return torch.zeros(2, *(shape or (8,)), dtype=torch.long)
    return example_input(model) if shape is None else torch.zeros(2, *shape)


def config_of(model: "nn.Module") -> dict | None:
    """The configuration of a model of transformers, for config.json."""
    config = getattr(model, "config", None)
    text = getattr(config, "to_json_string", None)
    return json.loads(text()) if callable(text) else None
