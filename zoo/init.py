"""Initial weights drawn from an explicit generator."""

import math

import torch
from torch import nn

from zoo.errors import ZooError
from zoo.kit import LayerScale, Residual
from zoo.vit import Tokens


@torch.no_grad()
def initialise(model: nn.Module, generator: torch.Generator | None = None) -> nn.Module:
    """Draw every weight of a zoo model from `generator`, in the order of its modules, and return the model.

    Convolutions get He's normal initialisation by fan-out (He et al. 2015), and bias 0. Linear layers, and convolutions
    with a bias in the CNN, ConvNeXt and the Vision Transformer, get torch's default: weight and bias are uniform within
    1/sqrt(fan-in). Embeddings are standard normal; class tokens and positions of patches have deviation 0.02. Norms
    have weight 1 and bias 0; step sizes start at 1, and layer scales where their spec says.

    Args:
        generator: on the model's device; None draws from torch's global generator.

    Raises:
        ZooError: for a module with weights for which there is no rule here.

    >>> from zoo import create
    >>> draws = [initialise(create("cnn"), torch.Generator().manual_seed(0)).fc1.weight for _ in range(2)]
    >>> torch.equal(*draws)
    True
    """
    plain = getattr(model, "torch_init", False)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and plain and module.bias is not None):
            nn.init.kaiming_uniform_(module.weight, a=math.sqrt(5), generator=generator)
            bound = 1 / math.sqrt(module.weight[0].numel())
            nn.init.uniform_(module.bias, -bound, bound, generator=generator)
        elif isinstance(module, nn.Conv2d):
            fan_out = module.weight[0, 0].numel() * module.out_channels / module.groups
            nn.init.normal_(module.weight, 0, math.sqrt(2 / fan_out), generator=generator)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, generator=generator)
        elif isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm | Residual | LayerScale):
            module.reset_parameters()
        elif isinstance(module, Tokens):
            module.reset_parameters(generator)
        elif module._parameters or module._buffers:
            raise ZooError(f"no initial weights for {name} ({type(module).__name__}): add a rule to zoo/init.py")
    return model
