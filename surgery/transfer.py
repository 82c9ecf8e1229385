"""Transfers to a device without a wait and back with one, and devices' precision."""

from collections.abc import Sequence

import torch
from torch import Tensor


def upload(tensor: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor to a device without waiting, as plain `Tensor.to` would.

    The copy is queued behind what the device still has to do. It is made from pinned memory, since from other memory
    the driver may wait, too. (In the other direction waiting is necessary: the numbers would not be there yet.)

    >>> upload(torch.tensor([2, 0]), "cpu")
    tensor([2, 0])
    """
    if tensor.dtype is torch.float64:
        tensor = tensor.to(widest(device))
    if tensor.device.type == "cpu" and torch.device(device).type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


WITHOUT_FLOAT64 = {"mps"}
"""The types of devices that have no float64: Apple's GPUs."""


def widest(device: torch.device | str) -> torch.dtype:
    """Return the dtype of a device's sums: float64, or float32 where it has none.

    >>> widest("cpu"), widest("mps")
    (torch.float64, torch.float32)
    """
    return torch.float32 if torch.device(device).type in WITHOUT_FLOAT64 else torch.float64


def double(tensor: Tensor) -> Tensor:
    """Return the tensor in float64, or in float32 where its device has no float64.

    >>> double(torch.tensor([1.0])).dtype
    torch.float64
    """
    return tensor.to(widest(tensor.device))


_AT_ONCE = 2**28  # bytes in one transfer, at most


def host_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return own contiguous copies on the CPU; small tensors move in one transfer.

    >>> a = torch.ones(3)
    >>> host_copies([a.expand(2, 3), a])[0].stride()
    (3, 1)
    """
    result, bundles = list(tensors), {}
    for i, tensor in enumerate(tensors):
        if tensor.device.type == "cpu":
            result[i] = tensor.detach().clone(memory_format=torch.contiguous_format)
            continue
        groups = bundles.setdefault((tensor.device, tensor.dtype), [[]])
        if groups[-1] and sum(tensors[j].nbytes for j in groups[-1]) + tensor.nbytes > _AT_ONCE:
            groups.append([])
        groups[-1].append(i)
    for bundle in (bundle for every in bundles.values() for bundle in every):
        flat = torch.cat([tensors[i].detach().reshape(-1) for i in bundle]).cpu()
        for i, values in zip(bundle, flat.split([tensors[i].numel() for i in bundle])):
            result[i] = values.view(tensors[i].shape).clone()
    return result


def as_bytes(tensor: Tensor) -> Tensor:
    """View a tensor's numbers as bytes, uint8 [n], on its device; copies if not dense.

    `Tensor.view` alone refuses axes of size 1 with another stride than 1, as `array[:, None]` of NumPy leaves them.

    >>> as_bytes(torch.tensor(1, dtype=torch.int16).expand(1, 1))
    tensor([1, 0], dtype=torch.uint8)
    """
    whole = tensor.detach().contiguous()
    return whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors on the host in float64, with one wait for each device.

    >>> download([torch.tensor([1.0, 2.0]), torch.tensor(3)])
    [tensor([1., 2.], dtype=torch.float64), tensor(3., dtype=torch.float64)]
    """
    copies = host_copies([t.detach() if t.device.type in WITHOUT_FLOAT64 else t.detach().double() for t in tensors])
    return [tensor.double() for tensor in copies]
