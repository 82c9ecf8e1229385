"""Initial weights drawn from an explicit generator."""

import math

import torch
from torch import nn


def initialise(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Redraw every convolution and linear layer of a zoo model from `generator`, reset its norms, return it.

    A convolution without bias feeds a norm and gets He's normal initialisation by fan-out (He et al. 2015);
    layers with a bias get torch's default, uniform within 1/sqrt(fan-in) for weight and bias.

    >>> from zoo import cnn
    >>> draws = [initialise(cnn(), torch.Generator().manual_seed(0)).fc1.weight for _ in range(2)]
    >>> torch.equal(*draws)
    True
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            if module.bias is None:
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu", generator=generator)
            else:
                nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5), generator=generator)
                bound = 1 / math.sqrt(module.weight[0].numel())
                nn.init.uniform_(module.bias, -bound, bound, generator=generator)
        elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
            module.reset_parameters()
    return model
