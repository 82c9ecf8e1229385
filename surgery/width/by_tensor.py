"""Notes about the tensors of a forward pass."""

from collections.abc import Iterator, MutableMapping
from typing import Any, TypeVar
from weakref import ref

from torch import Tensor

V = TypeVar("V")


class ByTensor(MutableMapping[Tensor, V]):
    """Values by tensor, which is compared by identity and not kept alive.

    torch's dictionary of this kind makes several objects to look at one, and a trace looks at each tensor many times.

    >>> import torch
    >>> a, b = torch.ones(2), torch.ones(2)
    >>> names = ByTensor()
    >>> names[a] = "a"
    >>> names.get(a), names.get(b)
    ('a', None)
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[ref[Tensor], V]] = {}

    def __contains__(self, tensor: Any) -> bool:
        entry = self._held.get(id(tensor))
        return entry is not None and entry[0]() is tensor

    def get(self, tensor: Tensor, default: Any = None) -> Any:
        """Return the value of a tensor, or the default."""
        entry = self._held.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else default

    def __getitem__(self, tensor: Tensor) -> V:
        if tensor not in self:
            raise KeyError(tensor)
        return self._held[id(tensor)][1]

    def __setitem__(self, tensor: Tensor, value: V) -> None:
        self._held[id(tensor)] = ref(tensor), value

    def __delitem__(self, tensor: Tensor) -> None:
        if tensor not in self:
            raise KeyError(tensor)
        del self._held[id(tensor)]

    def __iter__(self) -> Iterator[Tensor]:
        tensors = [reference() for reference, _ in self._held.values()]
        return iter([tensor for tensor in tensors if tensor is not None])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __bool__(self) -> bool:
        return bool(self._held)
