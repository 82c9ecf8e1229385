"""What CUDA allows of an operation, whether it makes the host wait, and how many kernels it launches."""

from collections.abc import Sequence

import torch
from torch import Tensor

aten = torch.ops.aten


class Forbidden(RuntimeError):
    """What a GPU would refuse, or do wrongly in silence."""


WAITING = {
    aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten.nonzero, aten.masked_select, aten.bincount, aten.histc,
    aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.repeat_interleave, aten._linalg_eigh, aten.allclose,
    aten._linalg_svd, aten._linalg_solve_ex, aten.linalg_cholesky_ex,
}  # fmt: skip
"""Operations whose result, or its shape, the host has to know."""

_INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}
_SCALARS = {aten.where, aten.masked_fill, aten.masked_fill_, aten.lerp, aten.lerp_, aten.fill_, aten.fill}
_NO_KERNEL = {
    aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.set_, aten.resize_,
    aten.detach, aten.lift_fresh, aten.alias, aten._unsafe_view, aten.is_same_size, aten.squeeze_, aten.unsqueeze_,
    aten.transpose_, aten.t_, aten.as_strided_,
}  # fmt: skip
_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # that one launch of a multi-tensor kernel takes, by lists of tensors
_BLOCKS, _ELEMENTS = 320, 65536  # blocks of one launch, elements of a block


def check_devices(func, args: Sequence, kwargs: dict, tensors: list[Tensor], on_device: list[bool]) -> bool:
    """Raise Forbidden for tensors of two devices where CUDA takes them of one; whether the host waits for a transfer
    in it.
    """
    packet = func.overloadpacket
    if all(on_device) or not any(on_device) or packet in (aten.copy_, aten._to_copy):
        return False
    strangers = [t for t, here in zip(tensors, on_device) if not here]
    if packet in _INDEXING:
        places = [t for t in args[1] if isinstance(t, Tensor)]
        if on_device[0] and all(any(t is place for place in places) or not t.ndim for t in strangers):
            return True  # CUDA takes indices from the host and copies them, waiting
    numbers = all(not t.ndim for t in strangers)
    if numbers and (
        torch.Tag.pointwise in func.tags or packet in _SCALARS or func._schema.name.startswith("aten::_fused")
    ):
        return False  # a number on the host becomes an argument of the kernel
    shapes = ", ".join(f"{tuple(t.shape)} on {'cuda' if here else 'cpu'}" for t, here in zip(tensors, on_device))
    raise Forbidden(f"{func}: tensors of two devices: {shapes}")


def waits(func, args: Sequence, kwargs: dict) -> bool:
    """Whether the host needs a number that the device computes."""
    packet = func.overloadpacket
    if packet is aten.repeat_interleave:
        return kwargs.get("output_size") is None
    if packet in _INDEXING:
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return packet in WAITING


def launches(func, args: Sequence, kwargs: dict, moved: bool) -> int:
    """About how many kernels and copies the device is given.

    Args:
        moved: whether the result has memory of its own or something was written; views launch nothing.
    """
    packet, name = func.overloadpacket, func._schema.name
    if packet in _NO_KERNEL or not moved:
        return 0
    if name.startswith(("aten::_foreach", "aten::_fused", "aten::_amp_foreach")):
        return _multi_tensor(args) + (packet is aten._foreach_norm)  # which joins its blocks
    if packet is aten.convolution:
        return 1 + (args[2] is not None)
    if packet is aten.convolution_backward:
        return sum(args[-1])
    return 1


def _multi_tensor(args: Sequence) -> int:
    """Of a kernel for lists of tensors: limited by the number of tensors and of blocks."""
    lists = [a for a in args if isinstance(a, list | tuple) and a and isinstance(a[0], Tensor)]
    most = _TENSORS[min(max(len(lists), 1), 5)]
    blocks = sum(-(-t.numel() // _ELEMENTS) for t in lists[0]) if lists else 0
    return max(1, -(-len(lists[0]) // most), -(-blocks // _BLOCKS)) if lists else 0


def tensors_of(tree) -> list[Tensor]:
    """All tensors in arguments or results (torch's own walk through trees takes several times as long)."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, list | tuple):
        return []
    return [tensor for part in tree for tensor in tensors_of(part)]
