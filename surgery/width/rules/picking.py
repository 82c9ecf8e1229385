"""Operations that pick positions of an axis, which is then fixed."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from surgery.width.axes import Axis, fix, picked, role, unify
from surgery.width.rules.registry import (
    COUNTED,
    RuleResult,
    broadcast,
    fix_all,
    fresh,
    results,
    rule,
    tensors,
    unify_last,
)

_INDEXED = picked("its positions are picked by an index")


@rule("select", carries=True)
def _select(view, args, out):
    axes = list(view.axes_of(args["self"]))
    whole = axes.pop(args["dim"])
    return RuleResult(axes, fixed_when_read=[(whole, role("one of its positions is picked"))])


@rule("unbind")
def _unbind(view, args, out):
    axes = list(view.axes_of(args["self"]))
    fix(axes.pop(args["dim"]), role("its positions are unpacked one by one"))
    return axes


@rule("unfold", sizes={"size"})
def _unfold(view, args, out):
    axes = list(view.axes_of(args["self"]))
    if axes:
        fix(axes[args["dimension"]], role("windows slide over it"))
        axes[args["dimension"]] = Axis(out.shape[args["dimension"] % len(axes)], role("windows slide over it"))
    return [*axes, Axis(args["size"], role("positions of a window"))]


@rule("diagonal")
def _diagonal(view, args, out):
    axes = view.axes_of(args["self"])
    drop = {args["dim1"] % len(axes), args["dim2"] % len(axes)}
    for dim in drop:
        fix(axes[dim], picked("its diagonal is taken"))
    return [*(axis for dim, axis in enumerate(axes) if dim not in drop), Axis(out.shape[-1], picked("a diagonal"))]


@rule("embedding")
def _embedding(view, args, out):
    rows, width = view.axes_of(args["weight"])
    fix(rows, role("its positions are looked up"))
    return RuleResult([*view.axes_of(args["indices"]), width], features=[width])


@rule("_embedding_bag _embedding_bag_forward_only")
def _embedding_bag(view, args, out):
    rows, width = view.axes_of(args["weight"])
    fix(rows, role("its positions are looked up"))
    if isinstance(args["per_sample_weights"], Tensor):
        unify(view.axes_of(args["per_sample_weights"])[0], view.axes_of(args["indices"])[0])
    bags, *others = results(out)
    return RuleResult([[Axis(bags.shape[0]), width], *(fresh(other.shape) for other in others)], features=[width])


@rule("index _unsafe_index index_put _unsafe_index_put")
def _index(view, args, out):
    axes, values = list(view.axes_of(args["self"])), args.get("values")
    picks = list(_picks(axes, args["indices"]))
    masks = [pick for pick in picks if pick.is_mask]
    indices = [pick.index for pick in picks if pick.index is not None and not pick.is_mask]
    for pick in masks:
        unify_last(pick.axes, view.axes_of(pick.index))
    if masks and not indices and values is not None and values.ndim == 0:
        return axes  # x[mask] = 0 changes each element in its place
    for pick in picks:
        for axis in pick.axes if pick.index is not None else ():
            fix(axis, _INDEXED)
    together = [] if masks else broadcast(view, indices, torch.broadcast_shapes(*(index.shape for index in indices)))
    rest = [axis for pick in picks if pick.index is None for axis in pick.axes]
    at = [position for position, pick in enumerate(picks) if pick.index is not None]
    front = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    if values is None:
        if masks:
            size = out.ndim - len(rest)
            together = fresh(out.shape[front : front + size], COUNTED)
        matrices = len(rest) > 1 and view.is_weight(args["self"])  # of a stack of them, as weights of experts are
        return RuleResult([*rest[:front], *together, *rest[front:]], is_weight=matrices)
    value_axes = view.axes_of(values)
    if masks:  # how many positions they choose is not known: their axis is what is left
        behind = rest[front:]
        unify_last(value_axes, behind)
        for axis in value_axes[: len(value_axes) - len(behind)]:
            fix(axis, _INDEXED)
        for axis in rest[:front]:
            fix(axis, _INDEXED)
    else:
        unify_last(value_axes, [*rest[:front], *together, *rest[front:]])
    return axes


class _Picking(NamedTuple):
    """Axes and the index along them; None if they are taken whole."""

    axes: list[Axis]
    index: Tensor | None  # type: ignore[assignment]  # tuples have a method of this name

    @property
    def is_mask(self) -> bool:
        return self.index is not None and self.index.dtype in (torch.bool, torch.uint8)


def _picks(axes: list[Axis], indices: Sequence[Tensor | None]) -> Iterator[_Picking]:
    """Yield the axes that each index picks along: a mask's own number, or one."""
    rest = iter(axes)
    for index in indices:
        count = index.ndim if _Picking([], index).is_mask else 1
        yield _Picking([next(rest) for _ in range(count)], index)
    yield from (_Picking([axis], None) for axis in rest)


@rule("index_select index_add index_copy index_fill index_reduce", carries=True)
def _index_select(view, args, out):
    axes = list(view.axes_of(args["self"]))
    if not axes:
        return axes
    dim = args["dim"] % len(axes)
    fix(axes[dim], _INDEXED)
    if "source" in args:  # it is laid into the tensor, at positions that the index says
        source_axes = list(view.axes_of(args["source"]))
        if source_axes:
            unify(source_axes.pop(dim), *view.axes_of(args["index"]) or fresh([1]))
        for x, y in zip([*axes[:dim], *axes[dim + 1 :]], source_axes):
            unify(x, y)
    elif "value" not in args:
        axes[dim] = Axis(out.shape[dim], picked("positions picked by an index"))
    return axes


@rule("gather scatter scatter_add scatter_reduce", carries=True)
def _gather(view, args, out):
    axes, index = view.axes_of(args["self"]), view.axes_of(args["index"])
    if not axes or not index:
        return index if "sparse_grad" in args else axes
    dim = args["dim"] % len(axes)
    fix(axes[dim], _INDEXED)
    fix(index[dim], _INDEXED)
    sources = [view.axes_of(args["src"])] if isinstance(args.get("src"), Tensor) else []
    for other in (axes, *sources):
        for i, (x, y) in enumerate(zip(other, index)):
            if x.size == y.size and (i != dim or other is not axes):
                unify(x, y)
            elif i != dim or other is not axes:
                fix(x, picked("some of its positions are picked"))
                fix(y, picked("some of its positions are picked"))
    return index if "sparse_grad" in args else axes


@rule("bucketize searchsorted")
def _search(view, args, out):
    *_, boundaries = view.axes_of(args["boundaries" if "boundaries" in args else "sorted_sequence"])
    fix(boundaries, picked("values are looked up among its positions"))
    source = args["self"]
    return view.axes_of(source) if isinstance(source, Tensor) else []


@rule("nonzero masked_select _unique _unique2 unique_dim unique_consecutive bincount torchvision::nms")
def _count(view, args, out):
    return fix_all(view, tensors(args), out, COUNTED)


@rule("nonzero_static masked_scatter take put histc histogram multinomial _ctc_loss")
def _pick(view, args, out):
    return fix_all(view, tensors(args), out)
