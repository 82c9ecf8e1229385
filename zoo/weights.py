"""Weights that models begin with: those that torchvision or timm publish, or those of a file.

torchvision and timm are imported where they are asked for. They need a network for what is not in their caches.
"""

import logging
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import Tensor, nn

from zoo import library as libraries
from zoo.errors import ZooError
from zoo.interop import TIMM, TORCHVISION, TORCHVISION_PLAIN, load
from zoo.spec import Spec

_LOG = logging.getLogger(__name__)
_FORMS = "torchvision:DEFAULT, timm:NAME, or the path of a .safetensors, .pt or .pth file"
_HEADS = re.compile(r"(?:.*\.)?(?:head|fc|classifier)(?:\.(\d+))?\.bias")  # of zoo, torchvision and timm


def build_with(spec: Spec, weights: str | Path, generator: torch.Generator | None = None) -> nn.Module:
    """Build a model whose weights are those of torchvision, of timm, or of a file, mapped by `zoo.load`.

    If they are for another number of classes than the spec's, the head stays as initialised, and a warning is logged.
    Everything else has to fit.

    Args:
        weights: "torchvision:DEFAULT" or another of torchvision's names for weights of this architecture
            ("torchvision:IMAGENET1K_V1"); "timm:NAME", where the zoo's model is compared with timm's on an image; or
            the path of a .safetensors, .pth or .pt file with a state dict.
        generator: draws the initial weights, of which only those of a new head remain.

    Raises:
        ZooError: if the weights are unknown, cannot be fetched or read, or belong to another model.
    """
    if not isinstance(weights, str | Path):
        raise ZooError(f"weights={weights!r}: give {_FORMS}")
    library, _, name = str(weights).partition(":")
    if library == "torchvision":
        state = fetch(library, counterpart(library, spec), name).state_dict()
    elif library == "timm":
        theirs = fetch(library, name)
        if ":" not in spec.name:
            _compare(spec, theirs, name)
        state = theirs.state_dict()
    elif Path(weights).is_file():
        state = read(weights)
    else:
        raise ZooError(f"there are no weights {str(weights)!r}: give {_FORMS}")
    try:
        return _with_state(spec, state, str(weights), generator)
    except ZooError as error:
        full = spec.depth == spec.member.depth and set(spec.rates.values()) == {1.0}
        hint = "" if full else "; weights of a full model go into a full one: cut that by surgery.ungraft and corner"
        raise ZooError(f"{spec.name} cannot begin with {weights}: {error}{hint}") from None


def read(file: str | Path) -> dict[str, Tensor]:
    """The state dict in a .safetensors file or a file of torch.save, without running code that it may hold.

    A training script's checkpoint may have it under "state_dict", "model_state_dict" or "model". What
    DistributedDataParallel and torch.compile put before every name is left out.

    Raises:
        ZooError: that begins with the file, if it is missing, damaged, or holds no state dict.

    >>> import tempfile
    >>> file = tempfile.mkdtemp() + "/net.pth"
    >>> torch.save({"model": {"module.weight": torch.ones(2)}, "epoch": 3}, file)
    >>> read(file)
    {'weight': tensor([1., 1.])}
    """
    if not Path(file).is_file():
        raise ZooError(f"{file}: there is no such file")
    try:
        if Path(file).suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError:
        what = "is damaged, or holds other objects than tensors, which could run code"
        raise ZooError(f"{file} {what}: save model.state_dict() instead") from None
    except Exception as error:  # of a damaged file: zipfile's, struct's, safetensors', ...
        raise ZooError(f"{file} cannot be read as weights: {_reason(error)}") from None
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not state or not all(map(_is_entry, state.items())):
        raise ZooError(f"{file} holds no state dict: save model.state_dict()")
    for prefix in ("module.", "_orig_mod.", "module."):
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return dict(state)


def fetch(library: str, name: str, tag: str = "DEFAULT") -> nn.Module:
    """A model of torchvision or timm with the weights that the library publishes for it, from its cache or the network.

    Args:
        library: "torchvision" or "timm".
        name: of the model there; timm's may end with a tag for weights.
        tag: torchvision's name for weights of this model.

    Raises:
        ZooError: if the model is unknown, the library publishes no such weights, or they cannot be fetched.
    """
    libraries.member(f"{library}:{name}")
    published = _published(library, name)
    if tag not in published:
        which, choice = (f"{tag!r} ", " or ".join(published)) if published else ("", "another model, or give a file")
        raise ZooError(f"{library} publishes no weights {which}for {name}: choose {choice}")
    try:
        if library == "torchvision":
            from torchvision import models

            return models.get_model(name, weights=tag)
        import timm

        with _no_retries():
            return timm.create_model(name, pretrained=True)
    except Exception as error:  # whatever the library's downloader raises: there are several, each with its own errors
        raise ZooError(
            f"the weights of {library}:{name} are not in the library's cache, and cannot be fetched from "
            f"{published[tag]} ({_reason(error)}). Without a network, save the model's state_dict() to a file on a "
            "machine that has one, and give that file"
        ) from error


def counterpart(library: str, spec: Spec) -> str:
    """The name of a spec's architecture in torchvision or timm, which publishes weights for it.

    Raises:
        ZooError: if it publishes none, with those for which it does.

    >>> counterpart("torchvision", Spec("mobilenetv2")), counterpart("timm", Spec("timm:resnet10t"))
    ('mobilenet_v2', 'resnet10t')
    """
    where, _, name = spec.name.rpartition(":")
    if where == library:
        return name
    plain = library == "torchvision" and spec.norm == "none"
    table = TIMM if library == "timm" else TORCHVISION_PLAIN if plain else TORCHVISION
    known = {ours: theirs for ours, theirs in table.items() if _published(library, theirs)}
    if spec.name not in known:
        which = spec.name + (" without norms" if plain else "")
        raise ZooError(
            f"{library} publishes no weights for {which}; it does for {', '.join(known)} and {library}:NAME. Choose "
            "one of them, or give a file"
        )
    return known[spec.name]


def classes(state: Mapping[str, Tensor]) -> int | None:
    """For how many classes a state of the zoo, torchvision or timm is; None if no tensor looks like its head's bias.

    >>> classes({"classifier.0.bias": torch.zeros(8), "classifier.3.bias": torch.zeros(5)})
    5
    """
    found = [(int(match[1] or 0), name) for name in state if (match := _HEADS.fullmatch(name))]
    return len(state[max(found)[1]]) if found else None


def _with_state(spec: Spec, state: Mapping[str, Tensor], source: str, generator: torch.Generator | None) -> nn.Module:
    theirs = classes(state)
    if theirs in (None, spec.num_classes):
        return load(spec.build(generator), state)
    full = load(replace(spec, num_classes=theirs).build(device="meta"), state).state_dict()
    model = spec.build(generator)
    head = [name for name, tensor in model.state_dict().items() if tensor.shape != full[name].shape]
    model.load_state_dict(full | {name: model.state_dict()[name] for name in head})
    text = "%s: %s stay as initialised, because the weights of %s are for %d classes and the model has %d"
    _LOG.warning(text, spec.name, " and ".join(head), source, theirs, spec.num_classes)
    return model


def _published(library: str, name: str) -> dict[str, Any]:
    """The weights that a library publishes for a model, and where each of them is."""
    if library == "torchvision":
        from torchvision import models

        return {tag: weights.url for tag, weights in models.get_model_weights(name).__members__.items()}
    import timm

    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        return {}
    return {"DEFAULT": f"https://huggingface.co/{config.hf_hub_id}" if config.hf_hub_id else config.url}


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


def _compare(spec: Spec, theirs: Any, name: str) -> None:
    """Raise ZooError unless the zoo's model of this name computes with timm's weights what timm's does.

    Weights do not show strides, padding and epsilons, in which timm's variants of an architecture differ.
    """
    channels, *sizes = theirs.pretrained_cfg["input_size"]
    options = {"image_size": sizes[-1], "norm_eps": spec.norm_eps, "in_channels": channels}
    options |= {field: getattr(spec, field) for field in ("norm", "heads") if getattr(spec, field) is not None}
    try:
        ours = load(Spec(spec.name, theirs.num_classes, **options).build(), theirs.state_dict())
    except ZooError as error:
        raise ZooError(f"timm's {name} is not the zoo's {spec.name}: {error}") from None
    image = torch.rand(1, channels, *sizes, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        a, b = ours.eval()(image), theirs.eval()(image)
    if (a - b).norm() <= 1e-3 * b.norm():
        return
    epsilons = {module.eps for module in theirs.modules() if hasattr(module, "eps")} - {spec.norm_eps}
    hint = f": its norms have another epsilon, give norm_eps={min(epsilons):g}" if epsilons else ""
    raise ZooError(f"timm's {name} has the tensors of the zoo's {spec.name}, but not its logits{hint}")


def _is_entry(item: tuple[Any, Any]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], Tensor)


def _reason(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
