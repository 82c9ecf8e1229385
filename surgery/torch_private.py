"""The parts of torch that surgery uses and torch does not promise to keep."""

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C import _dispatch_has_kernel_for_dispatch_key as _has_kernel
from torch.nn import Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map as tree_map

BatchNorm, Dropout = _BatchNorm, _DropoutNd


_FORMS: dict[Any, Any] = {}
"""The forms of results on the meta device, by what operations were given."""
_MOST_FORMS = 50_000  # some 50 MB


class Operations(TorchDispatchMode):
    """Passes operations to `run`; composite ones come apart in inference mode, too."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave `__torch_dispatch__` unwrapped: the wrapper imports torch.compile slowly."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if _is_composite(func):
            with self:
                return func._op_dk(DispatchKey.CompositeImplicitAutograd, *args, **kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Called in place of an operation, to run it."""
        return self.result(func, args, kwargs)

    def result(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return what an operation returns.

        On the meta device a tensor is no more than its form, which torch works out in Python (a batch norm's in twenty
        operations). What was worked out once is not worked out again, for the next block of the same sizes or another
        model. An operation in place, which keeps the form, has nothing left to do then.
        """
        makes = _makes(func)
        key = _form_key(func, args, kwargs) if makes else None
        if key and (known := _FORMS.get(key)) is not None:
            if makes == "the first argument":
                return args[0]
            forms, several = known
            tensors = [torch.empty_strided(size, step, dtype=dtype, device="meta") for size, step, dtype in forms]
            return tuple(tensors) if several else tensors[0]
        result = func(*args, **kwargs)
        parts = result if isinstance(result, tuple) else (result,)
        if not key:
            return result
        if makes == "the first argument":
            if result is args[0] and _form_key(func, args, kwargs) == key:
                _remember(key, ())
        elif all(type(p) is Tensor and p.is_meta and p.layout is torch.strided for p in parts):
            memories = {memory(part) for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)}
            if memories.isdisjoint(map(memory, parts)):  # no view, whatever its schema says
                forms = [(part.shape, part.stride(), part.dtype) for part in parts]
                _remember(key, (forms, isinstance(result, tuple)))
        return result


def _remember(key: Any, form: Any) -> None:
    if len(_FORMS) >= _MOST_FORMS:
        _FORMS.clear()
    _FORMS[key] = form


@cache
def _is_composite(func: Any) -> bool:
    return _has_kernel(func.name(), "CompositeImplicitAutograd")


@cache
def _makes(func: Any) -> str:
    """Return what an operation makes: new tensors, or its first argument in place."""
    arguments, returns = (
        [value.alias_info for value in some] for some in (func._schema.arguments, func._schema.returns)
    )
    if func.namespace != "aten" or torch.Tag.inplace_view in func.tags:  # an in-place view changes memory or sizes
        return ""
    if not any((*arguments, *returns)):
        return "new tensors"
    in_place = len(returns) == 1 and all(alias is not None and alias.is_write for alias in (*arguments[:1], *returns))
    return "the first argument" if in_place else ""


def memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _form_key(func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return all that a result's form depends on; None unless all tensors are meta."""
    key: list[Any] = [id(func), torch.get_default_dtype(), *kwargs]  # aten's operations stay; their hash is slow
    on_meta = False
    for value in (*args, *kwargs.values()):
        for part in value if isinstance(value, list) else (value,):
            kind = type(part)
            if kind is Tensor or kind is Parameter:
                if not part.is_meta or part.layout is not torch.strided:
                    return None
                on_meta = True
                key += (part.shape, part.stride(), part.dtype)
            elif isinstance(part, Tensor):
                return None
            else:
                key.append(part)
        key.append(type(value))  # 1 is equal to True and 1.0
    return tuple(key) if on_meta else None


class Watch(Operations):
    """A mode that sees each operation `before` and `after` it runs.

    >>> import torch
    >>> class Names(Watch):
    ...     def after(self, operation, args, kwargs, result): print(operation)
    >>> with Names(): _ = torch.ones(2) + 1
    aten.ones.default
    aten.add.Tensor
    """

    def run(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.before(func, args, kwargs)
        result = self.result(func, args, kwargs)
        self.after(func, args, kwargs, result)
        return result

    def before(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        """Called before an operation runs."""

    def after(self, operation: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Called after an operation has run."""
