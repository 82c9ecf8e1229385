"""Between the host and an accelerator: small numbers go there without a wait, and come back with a single one."""

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on a device, in the order of what that was given to do; plain `Tensor.to` waits for it.

    The other way nothing may be left out: without the wait the numbers would not be there yet.

    >>> upload(torch.tensor([2, 0]), "cpu")
    tensor([2, 0])
    """
    return tensor.to(device, non_blocking=tensor.device.type == "cpu")


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors on the host, in float64, waiting once for each device that they lie on.

    Integers are exact up to 2^53.

    >>> download([torch.tensor([1.0, 2.0]), torch.tensor(3)])
    [tensor([1., 2.], dtype=torch.float64), tensor(3., dtype=torch.float64)]
    """
    result: list[Tensor] = list(tensors)
    for device in {tensor.device for tensor in tensors}:
        here = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        flat = torch.cat([tensors[i].detach().reshape(-1).double() for i in here]).cpu()
        for i, values in zip(here, flat.split([tensors[i].numel() for i in here])):
            result[i] = values.view(tensors[i].shape)
    return result
