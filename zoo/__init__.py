"""Models whose width is an argument."""

import difflib
import inspect
from collections.abc import Callable

import torch
from torch import nn

from zoo.cnn import cnn
from zoo.errors import ZooError
from zoo.init import initialise
from zoo.resnet import resnet20

__all__ = ["ZooError", "cnn", "create", "initialise", "names", "resnet20"]

_FACTORIES: dict[str, Callable[..., nn.Module]] = {"cnn": cnn, "resnet20": resnet20}


def names() -> list[str]:
    """The models that `create` knows.

    >>> names()
    ['cnn', 'resnet20']
    """
    return sorted(_FACTORIES)


def create(name: str, generator: torch.Generator | None = None, **arguments) -> nn.Module:
    """Build a model by name.

    Args:
        name: one of `zoo.names()`.
        generator: draws the initial weights, on the CPU; None draws them as torch does, from its global
            generator.
        arguments: those of the factory: num_classes, in_channels, image_size, width, norm.

    Raises:
        ZooError: for an unknown name or an argument that the factory refuses.

    >>> net = create("resnet20", num_classes=10, width=0.5)
    >>> net(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    if name not in _FACTORIES:
        near = difflib.get_close_matches(name, _FACTORIES, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ZooError(f"unknown model {name!r}: {hint}there are {', '.join(names())}")
    factory = _FACTORIES[name]
    try:
        inspect.signature(factory).bind(**arguments)
    except TypeError as error:
        raise ZooError(f"{name}: {error}; it takes {', '.join(inspect.signature(factory).parameters)}") from None
    if arguments.get("num_classes", 1) < 1 or arguments.get("in_channels", 1) < 1:
        raise ZooError(f"{name}: num_classes and in_channels must be 1 or more")
    if generator is None:
        return factory(**arguments)
    with torch.random.fork_rng(devices=[]):  # torch's own draws, which are overwritten, leave no trace
        model = factory(**arguments)
    return initialise(model, generator)
