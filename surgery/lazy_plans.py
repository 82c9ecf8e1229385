"""Plans applied to states that are read piece by piece, one tensor at a time."""

from collections.abc import Callable, Mapping
from threading import Lock

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.lazy import SLAB, LazyState, Pieces, metas, pieces_of
from surgery.states import check_same
from surgery.submodel import Submodel
from surgery.submodel_embed import embedded
from surgery.submodel_index import take


def extract(plan: Submodel, full: Mapping[str, Tensor]) -> LazyState:
    """`plan.extract(full)` without reading more than one tensor at a time.

    Raises SurgeryError unless the tensors are those of the plan's full model.

    >>> from surgery.submodel import Source
    >>> plan = Submodel({"w": (Source("w", (((0, 2),),)),)}, {"w": (3,)})
    >>> extract(plan, {"w": torch.tensor([1, 2, 3])})["w"]
    tensor([1, 2])
    """
    _check(plan.shapes, full, "the plan's full model")
    entries = {}
    for name, (source, *_) in plan.entries.items():
        pieces = pieces_of(full, source.name)
        if any(runs is not None for runs in source.index):
            shape, index = plan.small_shapes[name], source.index
            pieces = _whole(shape, pieces, lambda pieces=pieces, index=index: take(pieces.whole(), index))
        entries[name] = pieces
    return LazyState(entries)


def embed(plan: Submodel, small: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None) -> LazyState:
    """The first result of `plan.embed(small, into=into)` without reading more than one full tensor at a time.

    >>> from surgery.submodel import Source
    >>> plan = Submodel({"w": (Source("w", (((0, 2),),)),)}, {"w": (3,)})
    >>> embed(plan, {"w": torch.tensor([1, 2])}, {"w": torch.tensor([7, 8, 9])})["w"]
    tensor([1, 2, 9])
    """
    _check(plan.small_shapes, small, "the plan's small model")
    if into is not None:
        _check(plan.shapes, into, "the plan's full model")
    dtypes, _ = embedded(plan.entries, plan.shapes, plan.dtypes, metas(small), into and metas(into), 0)
    own: dict[str, dict] = {target: {} for target in plan.shapes}
    for name, sources in plan.entries.items():
        for source in sources:
            own[source.name].setdefault(name, []).append(source)
    entries = {}
    for target, shape in plan.shapes.items():
        like = Pieces(shape, dtypes[target].dtype, torch.zeros, torch.device("cpu"))
        parts = own[target]
        if into is None and len(parts) == 1:
            ((name, (source,)),) = parts.items()
            if all(runs is None for runs in source.index):  # the whole of it
                entries[target] = pieces_of(small, name)
                continue

        def make(target=target, shape=shape, parts=parts, dtype=like.dtype) -> Tensor:
            before = torch.zeros(shape, dtype=dtype) if into is None else pieces_of(into, target).whole()
            values = {name: pieces_of(small, name).whole() for name in parts}
            return embedded(parts, {target: shape}, {}, values, {target: before}, 0)[0][target]

        entries[target] = _whole(shape, like, make)
    return LazyState(entries)


def cast(values: Mapping[str, Tensor], dtype: torch.dtype) -> LazyState:
    """The state with its floating-point tensors in another dtype.

    >>> cast({"w": torch.ones(2), "n": torch.tensor(3)}, torch.bfloat16)["w"].dtype
    torch.bfloat16
    """
    entries = {}
    for name in values:
        one = pieces_of(values, name)
        if one.dtype.is_floating_point and one.dtype is not dtype:
            read = lambda start, stop, read=one.read: read(start, stop).to(dtype)  # noqa: E731
            one = Pieces(one.shape, dtype, read, one.device)
        entries[name] = one
    return LazyState(entries)


def _whole(shape: tuple[int, ...], like: Pieces, make: Callable[[], Tensor]) -> Pieces:
    """A tensor that is made whole when its first piece is read, and dropped after the last one."""
    lock, kept = Lock(), []

    def read(start: int, stop: int) -> Tensor:
        with lock:
            if not kept:
                kept.append(make().reshape(-1))
            flat = kept[0]
            if stop == len(flat) and start + SLAB >= stop:
                kept.clear()
        return flat[start:stop]

    return Pieces(shape, like.dtype, read, like.device)


def _check(shapes: Mapping[str, tuple[int, ...]], values: Mapping[str, Tensor], what: str) -> None:
    expected = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    try:
        check_same(expected, metas(values), what, "the checkpoint")
    except SurgeryError as error:
        raise SurgeryError(f"{error}; give the model that the plan was made for") from None
