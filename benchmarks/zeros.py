"""An oracle for narrow models: the full model with zeros where the narrow one is not computes the same.

That holds exactly as long as nothing counts positions. What does count them is corrected here for the positions that
are zero: layer and group norms, means, the scale of scaled_dot_product_attention, and numbers that modules keep as
attributes. Where a model counts in another way (a division by the square root of a size in its own code) the two differ
though the narrow model is right; so a difference tells something only if all operations are known to be exact.
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import surgery
from benchmarks.calls import outputs

TOLERANCE = 1e-3  # of the largest output, in single precision
# Operations that give zero channels for zero channels, or whose other values are then multiplied by zero.
EXACT = """
    convolution addmm mm bmm dot mv add sub mul neg relu leaky_relu gelu silu tanh hardtanh hardswish elu abs square
    max_pool2d_with_indices max_pool3d_with_indices avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d
    native_batch_norm _native_batch_norm_legit_no_training mean embedding cat stack view _unsafe_view reshape permute
    transpose t expand slice select split split_with_sizes clone copy detach alias unsqueeze squeeze unbind roll repeat
    constant_pad_nd upsample_nearest2d upsample_bilinear2d pixel_shuffle flip empty zeros empty_like zeros_like
    new_zeros new_empty full arange fill _to_copy lift_fresh as_strided masked_fill index_select sum prelu
    _prelu_kernel dropout unfold
"""


def agrees(
    full: nn.Module, small: nn.Module, plan: surgery.Plan, example: Any, output: Callable[[Any], Any] | None = None
) -> tuple[bool, str]:
    """Return whether the full model with zeros computes what the small one does, and if not, what was seen.

    Returns:
        (True, ""), or (False, the first operation that may count positions, "" if there is none).
    """
    values = plan.embed(surgery.state(small))[0]
    for name, direction in values.items():  # of a weight norm: one of length 0 has no norm; its length is 0 anyway
        length = values.get(name.replace("weight_v", "weight_g").replace("original1", "original0"), direction)
        if length is not direction and len(length) == len(direction):
            direction[direction.flatten(1).abs().sum(1) == 0] = 1
    zeroed = surgery.load(copy.deepcopy(full), values)
    modules = dict(small.named_modules())
    for name, module in zeroed.named_modules():
        for attribute, value in vars(modules.get(name, small)).items():
            if isinstance(value, float) and isinstance(getattr(module, attribute, None), float):
                setattr(module, attribute, value)
    zeroed.eval(), small.eval()
    expected = outputs(small, example, output)
    seen = Operations()
    with seen:
        plain = outputs(zeroed, example, output)
    with counting_what_is_kept():
        corrected = outputs(zeroed, example, output)
    same = any(len(got) == len(expected) and all(map(close, got, expected)) for got in (plain, corrected))
    return same, "" if same else next((name for name in seen.names if name not in EXACT.split()), "")


def close(a: Tensor, b: Tensor) -> bool:
    """Return whether the values are the same up to rounding."""
    if a.shape != b.shape or not a.numel():
        return a.shape == b.shape
    a, b = a.double(), b.double()
    return bool((a - b).abs().max() <= TOLERANCE * b.abs().max().clamp(min=1e-6))


class Operations(TorchDispatchMode):
    """The names of the operations that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[str, None] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func._schema.name.split("::")[-1].rstrip("_")] = None
        return func(*args, **(kwargs or {}))


@contextmanager
def counting_what_is_kept() -> Iterator[None]:
    """Norms, means and attention count only the positions that are somewhere not zero."""
    with ExitStack() as stack:
        for (owner, name), corrected in CORRECTED.items():
            plain = getattr(owner, name)
            stack.enter_context(patch.object(owner, name, _first(corrected, plain)))
        fast = torch.backends.mha.get_fastpath_enabled()
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        torch.backends.mha.set_fastpath_enabled(False)
        yield


def _first(corrected: Any, plain: Any) -> Any:
    """Return the corrected function; the plain one for calls that it does not know."""

    def function(*args, **kwargs):
        result = corrected(*args, **kwargs)
        return plain(*args, **kwargs) if result is None else result

    return function


def _kept(x: Tensor, axis: int) -> Tensor:
    """By position along an axis whether it is anywhere not zero."""
    return x.ne(0).movedim(axis, 0).flatten(1).any(1)


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, **options: Any) -> Tensor | None:
    if dim is None or options:
        return None
    dims = [dim] if isinstance(dim, int) else list(dim)
    count = math.prod(max(1, int(_kept(x, axis).sum())) for axis in dims)
    return x.sum(dims, keepdim=keepdim) / count


def _moments(x: Tensor, mask: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    mask = mask.expand(x.shape).to(x)
    count = mask.sum(dims, keepdim=True).clamp(min=1)
    mean = (x * mask).sum(dims, keepdim=True) / count
    variance = ((x - mean) * mask).square().sum(dims, keepdim=True) / count
    return (x - mean) * mask / (variance + eps).sqrt()


def _layer_norm(x: Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor | None:
    if len(shape) != 1:
        return None
    result = _moments(x, _kept(x, -1), (-1,), eps)
    result = result if weight is None else result * weight
    return result if bias is None else result + bias


def _group_norm(x: Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Tensor:
    split = x.unflatten(1, (groups, -1))
    mask = _kept(x, 1).view(1, groups, -1, *[1] * (x.ndim - 2))
    result = _moments(split, mask, tuple(range(2, split.ndim)), eps).flatten(1, 2)
    shape = (-1, *[1] * (x.ndim - 2))
    result = result if weight is None else result * weight.view(shape)
    return result if bias is None else result + bias.view(shape)


def _rms_norm(x: Tensor, shape: Any, weight: Any = None, eps: float | None = None) -> Tensor | None:
    if len(shape) != 1:
        return None
    mean = _mean(x.square(), -1, keepdim=True)
    result = x / (mean + (torch.finfo(x.dtype).eps if eps is None else eps)).sqrt()
    return result if weight is None else result * weight


def _attention(
    q: Tensor, k: Tensor, v: Tensor, *args: Any, scale: float | None = None, **options: Any
) -> Tensor | None:
    if scale is not None:
        return None
    kept = max(1, max(int(_kept(head, -1).sum()) for head in (q.movedim(-3, 0) if q.ndim > 3 else [q])))
    return PLAIN_ATTENTION(q, k, v, *args, scale=kept**-0.5, **options)


PLAIN_ATTENTION = F.scaled_dot_product_attention
CORRECTED = {
    (torch, "mean"): _mean, (Tensor, "mean"): _mean, (F, "layer_norm"): _layer_norm, (F, "group_norm"): _group_norm,
    (F, "rms_norm"): _rms_norm, (F, "scaled_dot_product_attention"): _attention,
}  # fmt: skip
