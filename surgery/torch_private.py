"""What surgery takes from torch that torch does not promise to keep, in one place."""

from typing import Any

from torch._C import DispatchKey
from torch._C import _dispatch_has_kernel_for_dispatch_key as _has_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

BatchNorm, Dropout = _BatchNorm, _DropoutNd


class Operations(TorchDispatchMode):
    """`run` gets each operation, as outside of inference mode, where torch takes composite ones (softmax) apart."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if _has_kernel(func.name(), "CompositeImplicitAutograd"):
            with self:
                return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Called in place of an operation, to run it."""
        return func(*args, **kwargs)


class Watch(Operations):
    """Sees each operation `before` and `after` it runs as it is; subclasses say what they do then.

    >>> import torch
    >>> class Names(Watch):
    ...     def after(self, operation, args, kwargs, result): print(operation)
    >>> with Names(): _ = torch.ones(2) + 1
    aten.ones.default
    aten.add.Tensor
    """

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.before(func, args, kwargs)
        result = func(*args, **kwargs)
        self.after(func, args, kwargs, result)
        return result

    def before(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Called before an operation runs."""

    def after(self, operation: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Called after an operation has run."""
