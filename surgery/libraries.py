"""Models of timm and torchvision by name; the libraries are imported when needed."""

import difflib
import importlib
import inspect
from collections.abc import Callable
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from surgery.errors import SurgeryError, first_line

_LIBRARIES = {"timm": "timm", "torchvision": "torchvision.models"}


def make_model(name: str, **arguments) -> nn.Module:
    """Return a model of a library, with random weights.

    Args:
        name: "timm:NAME" (timm.create_model) or "torchvision:NAME" (torchvision.models.get_model).
        arguments: arguments of the library's factory, such as `num_classes`.

    Raises:
        SurgeryError: if the library has no such model, or its factory refuses the arguments.

    >>> type(make_model("torchvision:resnet18", num_classes=3)).__name__
    'ResNet'
    """
    library, model = check_named(name)
    try:
        if library == "timm":
            return _factories(library).create_model(model, **arguments)
        defaults = _torchvision_defaults(_factories(library).get_model_builder(model), model)
        return _factories(library).get_model(model, **{**defaults, **arguments})
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError) as error:
        raise SurgeryError(f"{name} cannot be built: {first_line(error)}", code="argument") from error


def check_named(name: str) -> tuple[str, str]:
    """Return (library, model) of a name; SurgeryError if unknown. Nothing is built.

    >>> check_named("timm:resnet18")
    ('timm', 'resnet18')
    """
    if not isinstance(name, str):
        raise SurgeryError(f"a name is timm:NAME or torchvision:NAME, not a {type(name).__name__}", code="argument")
    library, _, model = name.partition(":")
    if library not in _LIBRARIES or not model:
        near = difflib.get_close_matches(library, _LIBRARIES, n=1)
        hint = f"did you mean {f'{near[0]}:{model}'!r}? " if near and model else ""
        raise SurgeryError(f"unknown model {name!r}: {hint}give timm:NAME or torchvision:NAME", code="name")
    known = _factories(library).list_models()
    if model.split(".")[0] not in known:  # timm's names may end with a tag for weights
        near = difflib.get_close_matches(model, known, n=3, cutoff=0.5)
        hint = (
            f"did you mean {' or '.join(f'{library}:{other}' for other in near)}?" if near else "see its list_models()"
        )
        raise SurgeryError(f"{library} has no model {model!r}: {hint}", code="name")
    return library, model


def example_input(model: nn.Module, *, batch: int = 2) -> Tensor:
    """Return zeros of a model's input size, [batch, channels, ..., height, width].

    The size is from timm's metadata if the model has any, otherwise the one that torchvision's class takes or a
    configuration of transformers names, otherwise 224 x 224.

    >>> example_input(make_model("torchvision:resnet18")).shape
    torch.Size([2, 3, 224, 224])
    """
    if not isinstance(model, nn.Module):
        raise SurgeryError(f"an example input is made for a module, not for a {type(model).__name__}", code="argument")
    if not isinstance(batch, Integral) or batch < 0:
        raise SurgeryError(f"batch is the number of images, got {repr(batch)[:40]}", code="argument")
    return torch.zeros(batch, *input_size(model))


def input_size(model: nn.Module) -> tuple[int, ...]:
    """Return the shape of a model's input without the batch; see `example_input`.

    >>> input_size(make_model("torchvision:vit_b_32", image_size=64))
    (3, 64, 64)
    """
    for attribute in ("pretrained_cfg", "default_cfg"):
        config = getattr(model, attribute, None)
        size = config.get("input_size") if isinstance(config, dict) else getattr(config, "input_size", None)
        if size:
            return _choose_size(model, tuple(size))
    if type(model).__module__.startswith("torchvision.models.video"):
        return (3, 16, 112, 112) if type(model).__name__ == "VideoResNet" else (3, 16, 224, 224)
    config = getattr(model, "config", None)  # of transformers' models
    side = getattr(config, "image_size", None) or getattr(model, "image_size", 224)
    side = 299 if type(model).__name__ == "Inception3" else side
    sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
    if len(sides) != 2 or not all(isinstance(length, int) for length in sides):
        return (3, 224, 224)
    return (getattr(config, "num_channels", 3), *sides)


def _choose_size(model: nn.Module, size: tuple[int, ...]) -> tuple[int, ...]:
    """Return this model's size; `in_chans` and `img_size` may differ from metadata."""
    image = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if isinstance(image, tuple) and len(image) == 2:
        size = (size[0], *image)
    stem = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    return size if stem is None or stem.in_channels > 4 else (stem.in_channels, *size[1:])


def _factories(library: str) -> Any:
    """Return the module of a library that has `list_models` and makes models by name."""
    try:
        return importlib.import_module(_LIBRARIES[library])
    except ImportError:
        raise SurgeryError(f"{library} is not installed: pip install {library}", code="missing") from None


def _torchvision_defaults(factory: Callable[..., nn.Module], name: str) -> dict[str, bool | None]:
    """Return arguments that keep torchvision's models from downloading or warning."""
    downloads = "weights_backbone" in inspect.signature(factory).parameters
    backbone: dict[str, bool | None] = {"weights_backbone": None} if downloads else {}
    return backbone | ({"init_weights": True} if name in ("inception_v3", "googlenet") else {})
