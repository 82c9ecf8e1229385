"""The parts of torch that fl uses and torch does not promise to keep.

`fl.base.errors.FLError` says so where the installed torch lacks one of them.
"""

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F

from fl.base.errors import FLError

try:
    from torch.nn.modules.batchnorm import _NormBase
    from torch.utils._pytree import tree_flatten as tree_flatten
    from torch.utils._pytree import tree_leaves as tree_leaves
    from torch.utils._pytree import tree_map as tree_map
    from torch.utils._pytree import tree_unflatten as tree_unflatten

    BatchOrInstanceNorm = _NormBase
    # one kernel for all parameters, in place
    fused_sgd, fused_adam, fused_adamw = torch._fused_sgd_, torch._fused_adam_, torch._fused_adamw_
    # one launch for all tensors of a list; those whose names end in an underscore change it
    foreach_sub, foreach_add_ = torch._foreach_sub, torch._foreach_add_
    foreach_mul, foreach_mul_ = torch._foreach_mul, torch._foreach_mul_
    foreach_copy_, foreach_zero_, foreach_norm = torch._foreach_copy_, torch._foreach_zero_, torch._foreach_norm
    _ = torch.Tensor._version, torch.UntypedStorage._cdata
    _ = F.has_torch_function  # type: ignore[attr-defined]
except (ImportError, AttributeError) as error:
    raise FLError(
        f"torch {torch.__version__} does not have what fl takes from torch 2.11 to 2.15 ({error}): install one of them",
        code="missing",
    ) from error


def calling(function: Callable[..., Any], others: Mapping[Callable[..., Any], Callable[..., Any]]) -> FunctionType:
    """Return a copy of a function of `torch.nn.functional` that calls `others`.

    A `TorchFunctionMode` sees such a function, and not what it calls.
    """
    known = {**vars(F), "has_torch_function": lambda _: False}
    known |= {original.__name__: other for original, other in others.items()}
    copy = FunctionType(function.__code__, known, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def version_of(tensor: torch.Tensor) -> int:
    """Count how often a tensor was written to, unless inference mode made it.

    >>> version_of(torch.zeros(1).add_(1))
    1
    """
    return tensor._version


def storage_of(tensor: torch.Tensor) -> Any:
    """Return something that is equal for tensors that share their memory.

    >>> x = torch.zeros(2)
    >>> storage_of(x) == storage_of(x[:1])
    True
    """
    return tensor.untyped_storage()._cdata
