"""timm's and torchvision's image classifiers under the names "timm:NAME" and "torchvision:NAME", and their weights.

They are built at full size, with the spec's number of classes and input channels and, if the model's factory takes one,
the spec's image size. `surgery.narrow` and `surgery.ungraft` make them narrower and shallower. Both libraries are
imported where they are asked for; what is not in their caches of weights needs a network.
"""

import difflib
import inspect
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from zoo.errors import ZooError
from zoo.layers import dropout_rate


@lru_cache
def defaults(name: str) -> dict[str, Any]:
    """The fields that a spec of a library's model takes, with their defaults, found without building the model.

    Raises:
        ZooError: for an unknown name; it lists similar ones.

    >>> defaults("timm:resnet18")["image_size"]
    224
    """
    library, _, model = name.partition(":")
    if library not in ("timm", "torchvision") or not model:
        near = difflib.get_close_matches(library, ["timm", "torchvision"], n=1)
        hint = f"did you mean {f'{near[0]}:{model}'!r}? " if near and model else ""
        raise ZooError(f"unknown model {name!r}: {hint}give timm:NAME or torchvision:NAME (timm:resnet18)")
    if library == "timm":
        import timm

        known = timm.list_models()
    else:
        from torchvision import models

        known = models.list_models(module=models)  # without those for detection, video, ...
    if model.split(".")[0] not in known:  # timm's names may end with a tag for weights
        near = [f"{library}:{other}" for other in difflib.get_close_matches(model, known, n=3, cutoff=0.5)]
        hint = f"did you mean {' or '.join(near)}?" if near else "see its list_models()"
        raise ZooError(f"{library} has no image classifier {model!r}: {hint}")
    classes, channels, side = 1000, 3, 299 if name == "torchvision:inception_v3" else 224
    if library == "timm":
        try:
            config = timm.get_pretrained_cfg(model)
        except RuntimeError as error:  # an unknown tag
            raise ZooError(f"{library} has no model {model!r}: {error}") from None
        if config:
            classes, channels, side = config.num_classes or 1000, config.input_size[0], config.input_size[-1]
    return {"num_classes": classes, "in_channels": channels, "image_size": side, "dropout": None}


def build(spec: Any) -> nn.Module:
    """The model of a `zoo.Spec` with a library's name, whose weights the library draws."""
    if spec.rates != {"all": 1.0} or spec.depth is not None:
        raise ZooError(
            f"{spec.name} can be built at full size only; from that surgery.narrow(model, rate=..., example="
            "spec.example(2)) makes a narrow model and surgery.ungraft(model, keep=...) a shallow one"
        )
    if spec.dropout:
        raise ZooError(f"{spec.name}: dropout=0 switches all dropout off, and None keeps what the library sets")
    try:
        model = _at_full_size(spec)
    except (TypeError, ValueError, RuntimeError, AssertionError, KeyError) as error:
        size = f"{spec.image_size} x {spec.image_size}"
        raise ZooError(f"{spec.name} cannot be built for images of {size}: {first_line(error)}") from error
    if spec.dropout == 0:
        for module in model.modules():
            if rate := dropout_rate(module):
                setattr(module, rate, 0.0)
    return model


def _at_full_size(spec: Any) -> nn.Module:
    library, _, name = spec.name.partition(":")
    options: dict[str, Any] = {"num_classes": spec.num_classes, "image_size": spec.image_size}
    if library == "timm":
        return _make(library, name, in_chans=spec.in_channels, **options)
    from torchvision import models

    if "weights_backbone" in inspect.signature(models.get_model_builder(name)).parameters:
        options["weights_backbone"] = None
    model = _make(library, name, weights=None, **options)
    if spec.in_channels == 3:
        return model
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    if spec.in_channels != 1 or first is None or first.in_channels != 3 or first.groups != 1:
        raise ZooError(f"{spec.name} takes 3 channels, not {spec.in_channels}: choose a timm model")
    # the sum over colours does to a grey image what the convolution did to three equal channels
    first.weight = nn.Parameter(first.weight.detach().sum(1, keepdim=True))
    first.in_channels = 1
    return model


def _make(library: str, name: str, image_size: int | None = None, **options) -> nn.Module:
    """The library's own model, told the size of the images if it takes that argument."""
    if library == "timm":
        import timm

        create, argument = timm.create_model, "img_size"
    else:
        from torchvision import models

        create, argument = models.get_model, "image_size"
    if image_size is not None:
        try:
            return create(name, **(options | {argument: image_size}))
        except TypeError as error:
            if f"'{argument}'" not in str(error):  # the message names the unexpected argument in quotes
                raise
    return create(name, **options)


def fetch(library: str, name: str, tag: str = "DEFAULT") -> nn.Module:
    """A model of torchvision or timm with the weights that the library publishes for it, from its cache or the network.

    Args:
        library: "torchvision" or "timm".
        name: of the model there; timm's may end with a tag for weights.
        tag: torchvision's name for weights of this model.

    Raises:
        ZooError: if the model is unknown, the library publishes no such weights, or they cannot be fetched.
    """
    defaults(f"{library}:{name}")  # refuses an unknown name
    there = published(library, name)
    if tag not in there:
        which, choice = (f"{tag!r} ", " or ".join(there)) if there else ("", "another model, or give a file")
        raise ZooError(f"{library} publishes no weights {which}for {name}: choose {choice}")
    try:
        if library == "torchvision":
            return _make(library, name, weights=tag)
        with _no_retries():
            return _make(library, name, pretrained=True)
    except Exception as error:  # whatever the library's downloader raises: there are several, each with its own errors
        raise ZooError(
            f"the weights of {library}:{name} are not in the library's cache, and cannot be fetched from "
            f"{there[tag]} ({first_line(error).rstrip('.')}). Without a network, save the model's state_dict() to a "
            "file on a machine that has one, and give that file"
        ) from error


def published(library: str, name: str) -> dict[str, Any]:
    """The weights that a library publishes for a model, and where each of them is."""
    if library == "torchvision":
        from torchvision import models

        return {tag: weights.url for tag, weights in models.get_model_weights(name).__members__.items()}
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        return {}
    return {"DEFAULT": f"https://huggingface.co/{config.hf_hub_id}" if config.hf_hub_id else config.url}


@lru_cache
def tensor_names(library: str, name: str) -> list[str]:
    """The names in the state dict of a library's model, in its order."""
    with torch.device("meta"):
        return list(_make(library, name).state_dict())


@contextmanager
def _no_retries() -> Iterator[None]:
    """Without a network, look into Hugging Face's cache only: it would try a dozen times, for most of a minute."""
    from huggingface_hub import constants

    before = constants.HF_HUB_OFFLINE
    if not getproxies():
        try:
            socket.create_connection((urlsplit(constants.ENDPOINT).hostname, 443), timeout=10).close()
        except OSError:
            constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if it has none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
