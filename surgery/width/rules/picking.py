"""Operations that pick positions of an axis, which is then fixed."""

import torch

from surgery.width.axes import Axis, fix, unify
from surgery.width.rules.registry import broadcast, gathered, rule
from surgery.width.why import picked, role


@rule("select")
def _select(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    fix(found.pop(a["dim"]), role("one of its positions is picked"))
    trace.assign(out, found)


@rule("unbind")
def _unbind(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    fix(found.pop(a["dim"]), role("its positions are told apart"))
    for result in out:
        trace.assign(result, found)


@rule("unfold")
def _unfold(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    if found:
        fix(found[a["dimension"]], role("windows slide over it"))
        found[a["dimension"]] = Axis(out.shape[a["dimension"] % len(found)], role("windows slide over it"))
    trace.assign(out, [*found, Axis(a["size"], role("positions of a window"))])


@rule("diagonal")
def _diagonal(trace, a, out):
    found = trace.axes_of(a["self"])
    drop = {a["dim1"] % len(found), a["dim2"] % len(found)}
    for dim in drop:
        fix(found[dim], picked("its diagonal is taken"))
    kept = [axis for i, axis in enumerate(found) if i not in drop]
    trace.assign(out, [*kept, Axis(out.shape[-1], picked("a diagonal"))])


@rule("embedding")
def _embedding(trace, a, out):
    rows, width = trace.axes_of(a["weight"])
    fix(rows, role("its positions are looked up"))
    trace.made.append(width)
    trace.assign(out, [*trace.axes_of(a["indices"]), width])


@rule("index _unsafe_index index_put _unsafe_index_put")
def _index(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    indices = list(a["indices"]) + [None] * (len(found) - len(a["indices"]))
    for axis, index in zip(found, indices):
        if index is not None:
            fix(axis, picked("its positions are picked by an index"))
    if "values" in a:
        return trace.assign(out, found)
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        kept = [axis for axis, index in zip(found, indices) if index is None]
        if out.ndim == len(kept) + 1 and [x.size for x in kept] == list(out.shape[1:]):
            return trace.assign(out, [Axis(out.shape[0], picked("chosen by a mask")), *kept])
        return gathered(trace, found, out)
    where = [i for i, index in enumerate(indices) if index is not None]
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    where_to = broadcast(trace, given, shape)
    kept = [axis for axis, index in zip(found, indices) if index is None]
    front = where[0] if where == list(range(where[0], where[-1] + 1)) else 0
    trace.assign(out, [*kept[:front], *where_to, *kept[front:]])


@rule("index_select index_add index_copy index_fill")
def _index_select(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    fix(found[a["dim"]], picked("its positions are picked by an index"))
    if out.shape != a["self"].shape or "source" not in a:
        found[a["dim"]] = Axis(out.shape[a["dim"]], picked("positions picked by an index"))
    trace.assign(out, found)


@rule("gather scatter scatter_add take_along_dim scatter_reduce")
def _gather(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    index = trace.axes_of(a["index"])
    dim = a["dim"] % len(found)
    fix(found[dim], picked("its positions are picked by an index"))
    fix(index[dim], picked("its positions are picked by an index"))
    for i, (x, y) in enumerate(zip(found, index)):
        if i != dim and x.size == y.size:
            unify(x, y)
        elif i != dim:
            fix(x, picked("some of its positions are picked"))
            fix(y, picked("some of its positions are picked"))
    trace.assign(out, index if out.shape == a["index"].shape else found)
