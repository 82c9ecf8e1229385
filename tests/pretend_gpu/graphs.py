"""CUDA graphs: what is captured does not happen, and each replay repeats it on the same memory."""

import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_map

from pretend_gpu.memory import Memory
from pretend_gpu.rules import Forbidden


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


class Operation(NamedTuple):
    func: Any
    args: Any
    kwargs: Any
    results: list[Place | None]  # those that have memory of their own


class Recording:
    """What a graph does."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.operations: list[Operation] = []
        self.pool: dict[int, UntypedStorage] = {}
        self.outside: dict[int, tuple[weakref.ref, bool]] = {}  # memory that is read, and whether it is written
        self._before: list[tuple[UntypedStorage, UntypedStorage]] = []
        self.launches = 0

    def protect(self, storage: UntypedStorage) -> None:
        """Remember what lies in memory that an operation is about to write: nothing happens in a capture."""
        key = storage._cdata
        if key not in self.pool and not any(storage._cdata == old._cdata for old, _ in self._before):
            self._before.append((storage, storage.clone()))

    def add(self, func, args, kwargs, results: list[Tensor], own: list[Tensor], written: set[int]) -> None:
        """An operation that was captured.

        Args:
            results: its tensors. own: those of them with new memory, which is the pool's.
            written: addresses of the storages that it writes.
        """
        for tensor in own:
            storage = tensor.untyped_storage()
            self.pool[storage._cdata] = storage
        fresh = {id(t) for t in own}
        places = [self._place(t) if id(t) in fresh else None for t in results]
        args, kwargs = tree_map(lambda a: self._place(a) if isinstance(a, Tensor) else a, (args, kwargs))
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs), is_leaf=lambda a: isinstance(a, Place)):
            if isinstance(leaf, Place) and isinstance(leaf.storage, weakref.ref):
                key = leaf.storage()._cdata
                self.outside[key] = leaf.storage, key in written or self.outside.get(key, (None, False))[1]
        self.operations.append(Operation(func, args, kwargs, places))

    def _place(self, tensor: Tensor) -> Place:
        storage = tensor.untyped_storage()
        held = storage if storage._cdata in self.pool else weakref.ref(storage)
        if tensor not in self.memory:  # a number of the host is an argument of the kernel
            held = storage.clone()
        return Place(held, tensor.dtype, tensor.storage_offset(), tensor.shape, tensor.stride())

    def close(self) -> None:
        """Undo what the capture did, and fill its pool with rubbish, which is what lies in it before a replay."""
        for storage, before in self._before:
            storage.copy_(before)
        self._before.clear()
        for storage in self.pool.values():
            torch.empty(0, dtype=torch.uint8).set_(storage).fill_(255)

    def replay(self) -> None:
        with torch.no_grad():
            for operation in self.operations:
                args, kwargs = tree_map(
                    lambda a: a.tensor() if isinstance(a, Place) else a,
                    (operation.args, operation.kwargs),
                    is_leaf=lambda a: isinstance(a, Place),
                )
                results = operation.func(*args, **kwargs)
                leaves = [t for t in torch.utils._pytree.tree_leaves(results) if isinstance(t, Tensor)]
                for place, result in zip(operation.results, leaves):
                    if place is not None:
                        place.tensor().copy_(result)
