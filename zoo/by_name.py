"""Models by name, with drawn or given weights."""

from pathlib import Path

import torch
from torch import nn

from zoo.spec import Spec


def create(
    name: str, generator: torch.Generator | None = None, weights: str | Path | None = None, **fields
) -> nn.Module:
    """Build a model by name.

    Args:
        name: one of `zoo.names()`, "timm:NAME" or "torchvision:NAME".
        generator: draws the initial weights, on the CPU; None draws them from torch's global generator.
        weights: to begin with instead: "torchvision:DEFAULT", "timm:NAME", or a file with a state dict; see
            `zoo.weights.build_with`, also for what becomes of the head if the number of classes differs.
        fields: the fields of `Spec`: num_classes, width, depth, norm, ...

    Raises:
        ZooError: for an unknown name, a field that the architecture does not have, values out of range, and weights
            that cannot be had or belong to another model.

    >>> net = create("resnet20", num_classes=10, width=0.5)
    >>> net(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    spec = Spec.from_dict({"name": name, **fields})
    if weights is None:
        return spec.build(generator)
    from zoo.weights import build_with

    return build_with(spec, weights, generator)
