"""Models that begin with given weights: those that torchvision or timm publish, or those of a file.

torchvision and timm are imported where they are asked for. They need a network for what is not in their caches.
"""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor, nn

from zoo import library
from zoo.errors import ZooError
from zoo.interop import TORCHVISION, TORCHVISION_PLAIN, load
from zoo.spec import Spec

_LOG = logging.getLogger(__name__)
_FORMS = "torchvision:DEFAULT, timm:NAME, or the path of a .safetensors or .pth file"
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
    library_name, _, name = str(weights).partition(":")
    if library_name == "torchvision":
        state = _torchvision(spec, name)
    elif library_name == "timm":
        state = _timm(spec, name)
    else:
        state = _read(Path(weights))
    try:
        return _with_state(spec, state, str(weights), generator)
    except ZooError as error:
        full = spec.depth == spec.member.depth and set(spec.width) == {1.0}
        hint = "" if full else "; weights of a full model go into a full one: cut that by surgery.ungraft and corner"
        raise ZooError(f"{spec.name} cannot begin with {weights}: {error}{hint}") from None


def _with_state(spec: Spec, state: Mapping[str, Tensor], source: str, generator: torch.Generator | None) -> nn.Module:
    theirs = _classes(state)
    if theirs in (None, spec.num_classes):
        return load(spec.build(generator), state)
    full = load(replace(spec, num_classes=theirs).build(device="meta"), state).state_dict()
    model = spec.build(generator)
    head = [name for name, tensor in model.state_dict().items() if tensor.shape != full[name].shape]
    model.load_state_dict(full | {name: model.state_dict()[name] for name in head})
    text = "%s: %s stay as initialised, because the weights of %s are for %d classes and the model has %d"
    _LOG.warning(text, spec.name, " and ".join(head), source, theirs, spec.num_classes)
    return model


def _classes(state: Mapping[str, Tensor]) -> int | None:
    """For how many classes a state of the zoo, torchvision or timm is; None if no tensor looks like its head's bias.

    >>> _classes({"classifier.0.bias": torch.zeros(8), "classifier.3.bias": torch.zeros(5)})
    5
    """
    found = [(int(match[1] or 0), name) for name in state if (match := _HEADS.fullmatch(name))]
    return len(state[max(found)[1]]) if found else None


def _torchvision(spec: Spec, name: str) -> Mapping[str, Tensor]:
    from torchvision import models

    where, _, own = spec.name.rpartition(":")
    theirs = {"torchvision": own, "": (TORCHVISION_PLAIN if spec.norm == "none" else TORCHVISION).get(own)}.get(where)
    if theirs is None:
        raise ZooError(f"torchvision has no weights for {spec.name}: it has some for {', '.join(TORCHVISION)}")
    known = models.get_model_weights(theirs).__members__
    if name not in known:
        raise ZooError(
            f"torchvision has no weights {name!r} for {theirs}: choose {', '.join(known) or 'another model'}"
        )
    return _fetched(lambda: models.get_model(theirs, weights=known[name]), f"torchvision:{name}").state_dict()


def _timm(spec: Spec, name: str) -> Mapping[str, Tensor]:
    import timm

    library.member(f"timm:{name}")
    config = timm.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        tagged = timm.list_pretrained(f"{name.split('.')[0]}.*")
        raise ZooError(f"timm has no weights for {name}: choose {', '.join(tagged) or 'another model'}")
    theirs = _fetched(lambda: timm.create_model(name, pretrained=True), f"timm:{name}")
    if ":" not in spec.name:
        _compare(spec, theirs, name)
    return theirs.state_dict()


def _fetched(make: Callable[[], nn.Module], what: str) -> nn.Module:
    try:
        return make()
    except (
        Exception
    ) as error:  # whatever the library's downloader raises: there are several, each with errors of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise ZooError(
            f"cannot get the weights {what}, which needs a network unless they are in the library's cache: {reason}. "
            "Fetch them on a machine with a network, save model.state_dict() to a file, and give the path of that file"
        ) from error


def _compare(spec: Spec, theirs: nn.Module, name: str) -> None:
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


def _read(file: Path) -> Mapping[str, Tensor]:
    if not file.is_file():
        raise ZooError(f"there are no weights {str(file)!r}: give {_FORMS}")
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError:
        raise ZooError(f"{file} holds other objects than tensors: save model.state_dict() instead") from None
    except Exception as error:  # of a damaged file: zipfile's, struct's, safetensors', ...
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ZooError(f"{file} cannot be read as weights: {reason}") from None
    for key in ("state_dict", "model"):  # a training script's checkpoint
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ZooError(f"{file} holds no state dict: save model.state_dict()")
    return state
