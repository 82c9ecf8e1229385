"""Find out whether modules run one after another on an example."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor, nn

from surgery.forward import call, in_mode, observe, tensors_in
from surgery.torch_private import Watch, memory, tree_leaves


def follow(model: nn.Module, rows: Sequence[Sequence[str]], example: Any) -> list[bool | None]:
    """Return whether each module of rows runs on the output of the one before.

    None for a row without a module that runs on the example, or with one alone of several; modules that do not run are
    passed over. A row may run backwards. What counts is the first call of each.

    >>> class Sum(nn.ModuleList):
    ...     def forward(self, x): return sum(module(x) for module in self)
    >>> row, beside = (nn.Linear(2, 2), nn.Linear(2, 2)), Sum([nn.Linear(2, 2), nn.Linear(2, 2)])
    >>> follow(nn.Sequential(*row, beside), [["0", "1"], ["2.0", "2.1"]], Tensor([[1.0, 2.0]]))
    [True, False]
    """

    def watch(copy: nn.Module, inputs: Any) -> list[bool | None]:
        flow = _BlockOrder(copy, [name for row in rows for name in row])
        with in_mode(copy, training=False), flow:
            call(copy, inputs)
        return [flow.in_order(row) for row in rows]

    return observe(model, example, watch).found if rows else []


class _BlockOrder(Watch):
    """Notes from which blocks the numbers come that each block is called with first."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self._entries: dict[str, set[str] | None] = {}  # None: no tensors
        self._held: dict[int, tuple[Tensor, set[str]]] = {}  # by the memory that a tensor shares with its views
        inside = {name: set(model.get_submodule(name).modules()) for name in blocks}
        for name, modules in inside.items():
            shared = set().union(*(others for other, others in inside.items() if other != name))
            # Code may call what is inside of a block, such as a list of two modules, instead of the block.
            for module in modules - shared:
                module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
                module.register_forward_hook(self._leaving(name), with_kwargs=True)

    def _entering(self, name: str) -> Any:
        def enter(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if name not in self._entries:
                tensors = list(_tensors(args[:1])) or list(_tensors((args, kwargs)))
                self._entries[name] = self._sources(tensors) if tensors else None

        return enter

    def _leaving(self, name: str) -> Any:
        def leave(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            before = {_place(tensor) for tensor in _tensors((args, kwargs))}
            # What it was given, as it is or changed in place, is no output: others may run on that beside it.
            self._mark((tensor for tensor in _tensors(output) if _place(tensor) not in before), {name})

        return leave

    def after(self, operation: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        # What is written into a part of a tensor is not known to be what others read of it: experts write their rows.
        if writes_part(operation, args):
            return
        inputs = tensors_in((args, kwargs))
        numbers = [tensor for tensor in inputs if tensor.is_floating_point() or tensor.is_complex()]
        if sources := self._sources(numbers or inputs):  # an index says where, not what
            self._mark(tensors_in(result), sources)

    def in_order(self, row: Sequence[str]) -> bool | None:
        run = [name for name in row if name in self._entries]
        if not run or (len(run) == 1 and len(row) > 1):
            return None
        return all(self._reads_from(a, b) or self._reads_from(b, a) for a, b in pairwise(run))

    def _reads_from(self, before: str, block: str) -> bool:
        sources = self._entries[block]
        return sources is None or before in sources

    def _sources(self, tensors: Iterable[Tensor]) -> set[str]:
        return set().union(*(self._held[place][1] for place in map(_place, tensors) if place in self._held))

    def _mark(self, tensors: Iterable[Tensor], sources: set[str]) -> None:
        for tensor in tensors:
            held, known = self._held.get(_place(tensor), (tensor, set()))
            self._held[_place(tensor)] = held, known | sources


_SCATTERED = ("index_put_", "index_add_", "index_copy_", "index_fill_", "masked_scatter_", "masked_fill_", "scatter")


def writes_part(operation: Any, args: tuple) -> bool:
    """Return whether an operation writes only part of its first tensor in place."""
    name = operation._schema.name.rpartition("::")[2]
    if not name.endswith("_") or not args or not isinstance(args[0], Tensor):
        return False
    try:
        whole = args[0].nbytes >= args[0].untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # of sparse and nested tensors
        return False
    return not whole or name.startswith(_SCATTERED)


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Yield the tensors of a tree, and tensors in attributes of other objects in it."""
    yield from tensors_in(tree)
    for leaf in tree_leaves(tree):
        if not isinstance(leaf, Tensor) and hasattr(leaf, "__dict__") and not hasattr(leaf, "__dataclass_fields__"):
            yield from tensors_in(dict(vars(leaf)))


def _place(tensor: Tensor) -> int:
    """Return what a tensor shares with its views; itself without memory of its own."""
    try:
        return memory(tensor)
    except (NotImplementedError, RuntimeError):  # sparse and nested tensors, and those inside of vmap
        return id(tensor)
