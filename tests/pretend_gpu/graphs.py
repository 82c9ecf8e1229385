"""CUDA graphs: what is captured is repeated by each replay, on the same memory."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_map

from pretend_gpu.rules import Forbidden, tensors_of


class Place(NamedTuple):
    """Where a tensor lies."""

    storage: Any  # strong for memory of the graph's pool, weak for others': a graph keeps nothing else alive
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def tensor(self) -> Tensor:
        storage = self.storage() if isinstance(self.storage, weakref.ref) else self.storage
        if storage is None:
            raise Forbidden("a graph is replayed whose inputs or outputs are gone")
        return torch.empty(0, dtype=self.dtype).set_(storage, self.offset, self.shape, self.stride)


class Recording:
    """What a graph does."""

    def __init__(self) -> None:
        self.operations: list[tuple] = []
        self.pool: dict[int, UntypedStorage] = {}
        self.launches = 0

    def add(self, func, args, kwargs, results: list[Tensor], own: list[Tensor], numbers: list[Tensor]) -> None:
        """An operation that was captured.

        Args:
            results: its tensors. own: those of them with new memory, which is the pool's.
            numbers: those of its arguments that lie on the host, which go into the kernel.
        """
        for tensor in own:
            self.pool[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        fresh, numbers = {id(tensor) for tensor in own}, {id(tensor) for tensor in numbers}

        def place(tensor: Any) -> Any:
            if not isinstance(tensor, Tensor):
                return tensor
            storage = tensor.untyped_storage()
            kept = storage.clone() if id(tensor) in numbers else storage
            kept = kept if id(tensor) in numbers or storage._cdata in self.pool else weakref.ref(storage)
            return Place(kept, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

        places = [place(tensor) if id(tensor) in fresh else None for tensor in results]
        self.operations.append((func, *tree_map(place, (args, kwargs)), places))

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, places in self.operations:
            args, kwargs = tree_map(
                lambda a: a.tensor() if isinstance(a, Place) else a,
                (args, kwargs),
                is_leaf=lambda a: isinstance(a, Place),
            )
            for place, result in zip(places, tensors_of(func(*args, **kwargs))):
                if place is not None:
                    place.tensor().copy_(result)
