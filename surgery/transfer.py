"""Between the host and an accelerator: small numbers go there without a wait, and come back with a single one."""

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on a device, in the order of what that was given to do; plain `Tensor.to` waits for it.

    It goes through pinned memory, since from other memory the driver may wait as well. The other way nothing may be
    left out: without the wait the numbers would not be there yet.

    >>> upload(torch.tensor([2, 0]), "cpu")
    tensor([2, 0])
    """
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


_AT_ONCE = 2**28  # bytes that are put together for one transfer


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies on the CPU, which share no memory, in few transfers: small tensors of a dtype travel together.

    >>> a = torch.ones(3)
    >>> host_copies([a.expand(2, 3), a])[0].stride()
    (3, 1)
    """
    result, bundles = list(tensors), {}
    for i, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            result[i] = tensor.detach().clone(memory_format=torch.contiguous_format)
            continue
        mine = bundles.setdefault((tensor.device, tensor.dtype), [[]])
        if mine[-1] and sum(tensors[j].nbytes for j in mine[-1]) + tensor.nbytes > _AT_ONCE:
            mine.append([])
        mine[-1].append(i)
    for bundle in (bundle for every in bundles.values() for bundle in every):
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in bundle]).cpu()
        for i, values in zip(bundle, flat.split([tensors[i].numel() for i in bundle])):
            result[i] = values.view(tensors[i].shape).clone()
    return result


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
