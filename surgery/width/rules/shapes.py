"""Reshaping, reordering, splitting and joining."""

from surgery.width.axes import Axis, concatenation, fix, product, regroup, segment, unify
from surgery.width.rules.registry import fresh, gathered, rule
from surgery.width.why import picked, role


@rule("view flatten unflatten")
def _view(trace, a, out):
    if out.dtype != a["self"].dtype and out.shape != a["self"].shape:  # view(dtype) changes the last axis
        for axis in trace.axes_of(a["self"]):
            fix(axis, role("its memory is seen as another type"))
        trace.assign(out, fresh(out.shape, role("its memory is seen as another type")))
        return
    trace.assign(out, regroup(list(trace.axes_of(a["self"])), list(out.shape)))


@rule("permute")
def _permute(trace, a, out):
    found = trace.axes_of(a["self"])
    trace.assign(out, [found[dim] for dim in a["dims"]])


@rule("transpose t swapaxes adjoint")
def _transpose(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    if len(found) >= 2:
        i, j = a.get("dim0", 0), a.get("dim1", 1)
        found[i], found[j] = found[j], found[i]
    trace.assign(out, found)


@rule("unsqueeze")
def _unsqueeze(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    found.insert(a["dim"] % out.ndim, Axis(1))
    trace.assign(out, found)


@rule("squeeze")
def _squeeze(trace, a, out):
    kept = iter([axis for axis in trace.axes_of(a["self"]) if axis.size != 1])
    trace.assign(out, [Axis(1) if size == 1 else next(kept) for size in out.shape])


@rule("view_as_real")
def _view_as_real(trace, a, out):
    trace.assign(out, [*trace.axes_of(a["self"]), Axis(2, role("real and imaginary part"))])


@rule("view_as_complex")
def _view_as_complex(trace, a, out):
    *found, parts = trace.axes_of(a["self"])
    fix(parts, role("real and imaginary part"))
    trace.assign(out, found)


@rule("expand expand_as")
def _expand(trace, a, out):
    found = trace.axes_of(a["self"])
    result = fresh(out.shape)
    for position, axis in enumerate(reversed(found), 1):
        if axis.size == out.shape[-position]:
            result[-position] = axis
    trace.assign(out, result)


@rule("repeat tile")
def _repeat(trace, a, out):
    found = trace.axes_of(a["self"])
    found = [*fresh([1] * (out.ndim - len(found))), *found]
    trace.assign(out, [product([Axis(size // max(axis.size, 1)), axis]) for axis, size in zip(found, out.shape)])


@rule("repeat_interleave")
def _repeat_interleave(trace, a, out):
    source = a.get("self", a.get("repeats"))
    found = trace.axes_of(source)
    if a.get("dim") is None or not isinstance(a["repeats"], int):
        return gathered(trace, [*found], out)
    result = [
        axis if axis.size == size else product([axis, Axis(size // axis.size)]) for axis, size in zip(found, out.shape)
    ]
    trace.assign(out, result)


@rule("slice narrow")
def _slice(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    dim, size = a["dim"], found[a["dim"]].size
    start, stop, step = slice(a["start"], a.get("end"), a.get("step", 1)).indices(size)
    first = None
    if step == 1:
        first = segment(found[dim], 0, start) if start else None
        found[dim] = segment(found[dim], start, max(start, stop)) if stop > start else Axis(0)
    elif size % step == 0 and start < step and stop > size - step:
        # every step-th position from `start`: one position of a last digit
        rest = regroup([found[dim]], [size // step, step])
        fix(rest[1], role("one of its positions is picked"))
        found[dim] = rest[0]
    else:
        fix(found[dim], picked("some of its positions are picked"))
        found[dim] = Axis(out.shape[dim], picked("positions are picked"))
    trace.assign(out, found)
    return {"start": first} if first is not None else None


@rule("split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk unsafe_split_with_sizes")
def _split(trace, a, out):
    found, start = trace.axes_of(a["self"]), 0
    dim = a["dim"] % len(found)
    for result in out:
        stop = start + result.shape[dim]
        trace.assign(result, [*found[:dim], segment(found[dim], start, stop), *found[dim + 1 :]])
        start = stop
    return None


@rule("cat concatenate")
def _cat(trace, a, out):
    tensors = [t for t in a["tensors"] if t.shape != (0,) or out.ndim == 1]
    found = [trace.axes_of(t) for t in tensors]
    dim = a["dim"] % out.ndim
    for other in found[1:]:
        for i, (x, y) in enumerate(zip(found[0], other)):
            if i != dim:
                unify(x, y)
    trace.assign(out, [concatenation([f[dim] for f in found]) if i == dim else x for i, x in enumerate(found[0])])


@rule("stack")
def _stack(trace, a, out):
    found = [trace.axes_of(t) for t in a["tensors"]]
    for other in found[1:]:
        for x, y in zip(found[0], other):
            unify(x, y)
    result = list(found[0])
    result.insert(a["dim"] % out.ndim, Axis(len(found), role("tensors are stacked")))
    trace.assign(out, result)


@rule(
    """
    constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d _pad_circular
    reflection_pad3d replication_pad3d
    """
)
def _pad(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    pad, ends = a.get("pad", a.get("padding")), []
    for i in range(len(pad) // 2):
        position = len(found) - 1 - i
        axis = found[position]
        before, after = (Axis(max(0, n)) for n in pad[2 * i : 2 * i + 2])
        if min(pad[2 * i : 2 * i + 2]) < 0:
            fix(axis, role("it is cropped"))
            axis = segment(axis, max(0, -pad[2 * i]), axis.size - max(0, -pad[2 * i + 1]))
        found[position] = concatenation([before, axis, after])
        ends += [before, after]
    trace.assign(out, found)
    return {"pad": ends} if min(pad) >= 0 else None


@rule("as_strided")
def _as_strided(trace, a, out):
    if out.shape == a["self"].shape and out.stride() == a["self"].stride():
        return trace.assign(out, trace.axes_of(a["self"]))
    return gathered(trace, list(trace.axes_of(a["self"])), out)
