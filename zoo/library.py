"""timm's and torchvision's image classifiers under the names "timm:NAME" and "torchvision:NAME".

They are built at full size, with the spec's number of classes and input channels and, if the model's factory takes one,
the spec's image size. `surgery.narrow` and `surgery.ungraft` make them narrower and shallower.
"""

import difflib
import inspect
from functools import lru_cache, partial
from typing import Any

from torch import nn

from zoo.blueprint import Blueprint
from zoo.errors import ZooError
from zoo.kit import dropout_rate
from zoo.member import Member


@lru_cache
def member(name: str) -> Member:
    """The description of a library's model, without building it; the ZooError for an unknown name lists similar ones.

    >>> member("timm:resnet18").defaults["image_size"]
    224
    """
    library, _, model = name.partition(":")
    if library not in _KNOWN or not model:
        near = difflib.get_close_matches(library, _KNOWN, n=1)
        hint = f"did you mean {f'{near[0]}:{model}'!r}? " if near and model else ""
        raise ZooError(f"unknown model {name!r}: {hint}give timm:NAME or torchvision:NAME (timm:resnet18)")
    known = _KNOWN[library]()
    if model.split(".")[0] not in known:  # timm's names may end with a tag for weights
        near = [f"{library}:{other}" for other in difflib.get_close_matches(model, known, n=3, cutoff=0.5)]
        hint = f"did you mean {' or '.join(near)}?" if near else "see its list_models()"
        raise ZooError(f"{library} has no image classifier {model!r}: {hint}")
    try:
        classes, (channels, *sizes) = _METADATA[library](model)
    except RuntimeError as error:  # an unknown tag
        raise ZooError(f"{library} has no model {model!r}: {error}") from None
    defaults = {"num_classes": classes, "in_channels": channels, "image_size": sizes[-1], "dropout": None}
    return Member(partial(_build, _FACTORY[library]), None, ("all",), defaults, library, initialised=True)


def _build(factory, spec: Blueprint) -> nn.Module:
    if spec.rates != {"all": 1.0} or spec.depth is not None:
        raise ZooError(
            f"{spec.name} can be built at full size only; from that surgery.narrow(model, rate=..., example="
            "spec.example(2)) makes a narrow model and surgery.ungraft(model, keep=...) a shallow one"
        )
    if spec.dropout:
        raise ZooError(f"{spec.name}: dropout=0 switches all dropout off, and None keeps what the library sets")
    try:
        model = factory(spec)
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        size = f"{spec.image_size} x {spec.image_size}"
        raise ZooError(f"{spec.name} cannot be built for images of {size}: {reason}") from error
    if spec.dropout == 0:
        _switch_off_dropout(model)
    return model


def _timm(spec: Blueprint) -> nn.Module:
    import timm

    arguments = {"num_classes": spec.num_classes, "in_chans": spec.in_channels}
    return _sized(partial(timm.create_model, spec.name.partition(":")[2]), "img_size", spec.image_size, arguments)


def _torchvision(spec: Blueprint) -> nn.Module:
    from torchvision import models

    arguments = {"num_classes": spec.num_classes, "weights": None}
    if "weights_backbone" in _torchvision_arguments(spec.name.partition(":")[2]):
        arguments["weights_backbone"] = None
    factory = partial(models.get_model, spec.name.partition(":")[2])
    model = _sized(factory, "image_size", spec.image_size, arguments)
    return model if spec.in_channels == 3 else _grey(spec, model)


def _sized(factory, argument: str, size: int, arguments: dict[str, Any]) -> nn.Module:
    """Call a factory with the size of the images, if it takes that argument."""
    try:
        return factory(**{argument: size}, **arguments)
    except TypeError as error:
        if f"'{argument}'" not in str(error):  # the message names the unexpected argument in quotes
            raise
        return factory(**arguments)


def _grey(spec: Blueprint, model: nn.Module) -> nn.Module:
    """Sum the first convolution over colours, so that it does to a grey image what it did to three equal channels."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if spec.in_channels != 1 or first is None or first.in_channels != 3 or first.groups != 1:
        raise ZooError(f"{spec.name} takes 3 channels, not {spec.in_channels}: choose a timm model")
    first.weight = nn.Parameter(first.weight.detach().sum(1, keepdim=True))
    first.in_channels = 1
    return model


def _switch_off_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if rate := dropout_rate(module):
            setattr(module, rate, 0.0)


def _timm_names() -> set[str]:
    import timm

    return set(timm.list_models())


def _timm_metadata(model: str) -> tuple[int, tuple[int, ...]]:
    import timm

    config = timm.get_pretrained_cfg(model)
    return (config.num_classes or 1000, tuple(config.input_size)) if config else (1000, (3, 224, 224))


def _torchvision_names() -> set[str]:
    from torchvision import models

    return set(models.list_models(module=models))  # without those for detection, video, ...


def _torchvision_arguments(model: str) -> set[str]:
    from torchvision import models

    return set(inspect.signature(models.get_model_builder(model)).parameters)


def _torchvision_metadata(model: str) -> tuple[int, tuple[int, ...]]:
    side = 299 if model == "inception_v3" else 224
    return 1000, (3, side, side)


_KNOWN = {"timm": _timm_names, "torchvision": _torchvision_names}
_METADATA = {"timm": _timm_metadata, "torchvision": _torchvision_metadata}
_FACTORY = {"timm": _timm, "torchvision": _torchvision}
