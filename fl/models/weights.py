"""Trained weights to begin a run with: from a file, or as timm and torchvision publish them."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

import zoo
from fl.base.errors import FLError
from fl.models.own import is_own, said
from zoo import weights

LIBRARIES = ("timm", "torchvision")
SUFFIXES = (".safetensors", ".pt", ".pth")


class Weights(NamedTuple):
    """Trained weights, under the names that their source gives them.

    Attributes:
        source: the file, or timm:NAME or torchvision:NAME.
        sha256: of the file; of weights that a library fetched, of their names and values.
    """

    tensors: dict[str, Tensor]
    source: str
    sha256: str


def check_init(init: str, model: str) -> None:
    """Raise FLError unless --init has a form that `read` takes for a model of this name. Nothing is opened.

    >>> check_init("timm", "resnet18")
    >>> check_init("weights.txt", "resnet18")
    Traceback (most recent call last):
    fl.base.errors.FLError: --init weights.txt: give timm, torchvision or a file *.safetensors, *.pt or *.pth
    """
    if init not in LIBRARIES and Path(init).suffix not in SUFFIXES:
        raise FLError(f"--init {init}: give timm, torchvision or a file *.safetensors, *.pt or *.pth")
    if init in LIBRARIES and is_own(model):
        raise FLError(
            f"--init {init}: {init} publishes no weights for a model of your own ({said(model)}): save a state_dict() "
            f"with the names of your model to a file, and give --init FILE.pt; or choose --model {init}:NAME"
        )


def read(init: str, spec: zoo.Spec) -> Weights:
    """The weights that --init names.

    Args:
        init: a file, or timm or torchvision for what that library publishes for the model.
        spec: of the model that begins with them.

    Raises:
        FLError: for a file that cannot be read or holds no weights; if the library publishes none for the model, or
            they cannot be fetched.
    """
    check_init(init, spec.name)
    if init in LIBRARIES:
        try:
            name = weights.counterpart(init, spec)
            tensors = weights.fetch(init, name).state_dict()
        except zoo.ZooError as error:
            raise FLError(f"--init {init}: {error} (--init FILE.safetensors, .pt or .pth)") from None
        return Weights(tensors, f"{init}:{name}", _hash(tensors))
    try:
        tensors = weights.read(init)
    except zoo.ZooError as error:
        raise FLError(f"--init {error}") from None
    if any("/" in name for name in tensors):
        raise FLError(f"--init {init} is a checkpoint: give the file that `python -m fl.export RUN FILE` makes of it")
    with open(init, "rb") as file:
        return Weights(tensors, init, hashlib.file_digest(file, "sha256").hexdigest())


def _hash(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        digest.update(tensor.detach().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
