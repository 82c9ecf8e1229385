"""Trained weights to begin a run with: from a file, or as timm and torchvision publish them."""

import hashlib
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import zoo
from fl.base.errors import FLError
from surgery.errors import first_line

LIBRARIES = ("timm", "torchvision")
SUFFIXES = (".safetensors", ".pt", ".pth")
_COUNTERPARTS = {
    "timm": {"mobilenetv2": "mobilenetv2_100"},
    "torchvision": {
        "mobilenetv2": "mobilenet_v2", "efficientnetv2_s": "efficientnet_v2_s", "efficientnetv2_m": "efficientnet_v2_m",
        **{f"vgg{n}": f"vgg{n}_bn" for n in (11, 13, 16, 19)},
    },
}  # fmt: skip
_SAME = ("resnet18", "resnet34", "resnet50")  # named alike everywhere


class Weights(NamedTuple):
    """Trained weights, under the names that their source gives them.

    Attributes:
        source: the file, or timm:NAME or torchvision:NAME.
        sha256: of the file; of weights that a library fetched, of their names and values.
    """

    tensors: dict[str, Tensor]
    source: str
    sha256: str


def check_init(init: str) -> None:
    """Raise FLError unless --init has a form that `read` takes. Nothing is opened.

    >>> check_init("timm")
    >>> check_init("weights.txt")
    Traceback (most recent call last):
    fl.base.errors.FLError: --init weights.txt: give timm, torchvision or a file *.safetensors, *.pt or *.pth
    """
    if init not in LIBRARIES and Path(init).suffix not in SUFFIXES:
        raise FLError(f"--init {init}: give timm, torchvision or a file *.safetensors, *.pt or *.pth")


def read(init: str, model: str) -> Weights:
    """The weights that --init names.

    Args:
        init: a file, or timm or torchvision for what that library publishes for the model.
        model: the model's name, as in --model.

    Raises:
        FLError: for a file that cannot be read or holds no weights; if the library publishes none for the model, or
            they cannot be fetched.
    """
    check_init(init)
    if init in LIBRARIES:
        source = f"{init}:{counterpart(init, model)}"
        tensors = _fetched(source, model)
        return Weights(tensors, source, _hash(tensors))
    path = Path(init)
    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else _unpickled(path)
        with open(path, "rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise FLError(f"--init {init}: there is no such file") from None
    except (SafetensorError, OSError) as error:
        raise FLError(f"--init {init} cannot be read: {first_line(error)}") from None
    if any("/" in name for name in tensors):
        raise FLError(f"--init {init} is a checkpoint: give the file that `python -m fl.export RUN FILE` makes of it")
    return Weights(_bare(tensors), init, sha256)


def counterpart(library: str, model: str) -> str:
    """The name of a model in a library that publishes weights for it.

    >>> counterpart("torchvision", "mobilenetv2"), counterpart("timm", "timm:resnet10t")
    ('mobilenet_v2', 'resnet10t')
    """
    own, _, name = model.rpartition(":")
    if own == library:
        return name
    known = {name: name for name in _SAME} | _COUNTERPARTS[library]
    if own or model not in known:
        raise FLError(
            f"--init {library}: {library} publishes no weights for --model {model}; it does for {', '.join(known)} and "
            f"{library}:NAME. Give a file, or another --model"
        )
    return known[model]


def in_order(tensors: Mapping[str, Tensor], model: str) -> Mapping[str, Tensor]:
    """The weights of the counterpart of a zoo's model, in the order of its state dict, by which `zoo.load` knows them.
    A safetensors file does not keep it. Other weights are returned as they are.
    """
    for library in LIBRARIES:
        known = _COUNTERPARTS[library].get(model, model)
        for name in (known, known.removesuffix("_bn")):
            try:
                names = list(zoo.Spec(f"{library}:{name}").build(device="meta").state_dict())
            except zoo.ZooError:
                continue
            if tensors.keys() - set(names) == set() and len(tensors) >= len(names) / 2:
                return {name: tensors[name] for name in names if name in tensors}
    return tensors


def _fetched(source: str, model: str) -> dict[str, Tensor]:
    library, _, name = source.partition(":")
    where = source
    try:
        if library == "torchvision":
            from torchvision import models

            weights = models.get_model_weights(name).DEFAULT
            where = weights.url
            return dict(weights.get_state_dict(progress=False, check_hash=True))
        import timm

        config = timm.get_pretrained_cfg(name)
        if config is None or not config.has_weights:
            raise FLError(f"--init timm: timm publishes no weights for {name}; give a file, or another --model")
        where = f"https://huggingface.co/{config.hf_hub_id}" if config.hf_hub_id else config.url
        with _no_retries():
            return timm.create_model(name, pretrained=True).state_dict()
    except FLError:
        raise
    except Exception as error:  # whatever its way through the network raises
        raise FLError(
            f"--init {library}: the weights of {source} cannot be fetched from {where} ({first_line(error)}); where "
            "there is no network, give their file: --init FILE.safetensors (or .pt, .pth)"
        ) from None


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


def _unpickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of torch.save, which is read without running code that it may hold."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # pickle's many ways to fail
        raise FLError(
            f"--init {path} cannot be read as weights: it is damaged, or holds more than tensors, which could "
            "run code; save them with torch.save(model.state_dict(), FILE)"
        ) from None
    for key in ("state_dict", "model_state_dict", "model"):  # as training scripts wrap it
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found or not all(isinstance(t, Tensor) for t in found.values()):
        raise FLError(f"--init {path} is no state dict: save it with torch.save(model.state_dict(), FILE)")
    return dict(found)


def _bare(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without what DistributedDataParallel and torch.compile put before every name."""
    for prefix in ("module.", "_orig_mod."):
        if all(name.startswith(prefix) for name in tensors):
            tensors = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    return tensors


def _hash(tensors: Mapping[str, Tensor]) -> str:
    def parts() -> Iterator[bytes]:
        for name, tensor in sorted(tensors.items()):
            yield f"{name} {tensor.dtype} {list(tensor.shape)}".encode()
            yield tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes()

    digest = hashlib.sha256()
    for part in parts():
        digest.update(part)
    return digest.hexdigest()
