"""Linear combinations of tensors, and the inner products by which spherical methods choose them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.lazy import Reader, spans
from surgery.merge.group import Group


def combination(group: Group, coefficients: Sequence[float]) -> Reader:
    """sum c_k x_k, or base + sum c_k (x_k - base).

    Tensors of coefficient 0 are not read. If one coefficient is 1 and all others are 0 the result is that tensor, bit
    for bit.
    """
    used = [(i, c) for i, c in enumerate(coefficients) if c]
    if len(used) == 1 and used[0][1] == 1:
        return lambda start, stop: group.value(used[0][0], start, stop)

    def read(start: int, stop: int) -> Tensor:
        total = None
        for i, c in used:
            part = group.delta(i, start, stop) * c
            total = part if total is None else total.add_(part)
        if group.base is None:
            return total
        return group.origin(start, stop) if total is None else total.add_(group.origin(start, stop))

    return read


def gram(group: Group) -> Tensor:
    """The inner products [K, K] of the tensors (or of their differences from the base), in float64.

    Raises:
        SurgeryError: for numbers so large that their squares are infinite.
    """
    k = len(group.tensors)
    result = torch.zeros(k, k, dtype=torch.float64, device=group.tensors[0].device)
    for start, stop in spans(group.size):
        rows = torch.stack([group.delta(i, start, stop).double() for i in range(k)])
        result += rows @ rows.T
    result = result.cpu()
    if bad := [whose for whose, finite in zip(group.whose, result.diagonal().isfinite().tolist()) if not finite]:
        raise SurgeryError(
            f"{group.name!r} of {bad[0]} holds numbers too large for a direction: leave that model out, or merge by "
            "`linear`"
        )
    return result
