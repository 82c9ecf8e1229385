"""What each aten operation does to axes: one rule for each kind of operation.

A rule gets the trace, the call's arguments by their names in the operation's schema, and the result. It gives the
result its axes and unifies those that must be the same. It may return the call's integers that are sizes of axes
(a group count), so that the attributes they come from can be set right.
"""

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from surgery import axes
from surgery.axes import Axis, fix, mark_grouping, product, regroup, segment, total, unify

if TYPE_CHECKING:
    from surgery.trace import Trace

Arguments = dict[str, Any]
Rule = Callable[["Trace", Arguments, Any], dict[int, Axis] | None]

ALIASES = {"_unsafe_view": "view", "reshape": "view", "_reshape_alias": "view"}
# How memory is laid out may differ between a model and a narrower one: these are no steps to compare.
LAYOUT = {"clone", "contiguous", "detach", "alias", "_to_copy", "expand", "lift_fresh", "empty_like", "copy"}

_RULES: dict[str, Rule] = {}


def rule_for(func: Any, name: str) -> Rule | None:
    """The rule for an operation, or None."""
    if name in _RULES:
        return _RULES[name]
    return _pointwise if torch.Tag.pointwise in func.tags else None


def _rule(names: str) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


def _new(shape, why: str = "") -> list[Axis]:
    return [Axis(size, fixed=why) for size in shape]


def _results(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, list | tuple) else [out]) if isinstance(t, Tensor)]


# Element by element


def broadcast(trace: "Trace", tensors: list[Tensor], shape) -> list[Axis]:
    """The axes of tensors that were broadcast against each other."""
    result = []
    for position in range(1, len(shape) + 1):
        same = [trace.axes_of(t)[-position] for t in tensors if t.ndim >= position]
        same = [axis for axis in same if axis.size == shape[-position]]
        for other in same[1:]:
            unify(same[0], other)
        result.append(axes.find(same[0]) if same else Axis(shape[-position]))
    return result[::-1]


@_rule(
    """
    where masked_fill copy lerp addcmul addcdiv fill zero _prelu_kernel rsub hardswish hardtanh hardsigmoid
    leaky_relu elu gelu silu mish softplus log_sigmoid_forward relu6 celu clamp rrelu_with_noise threshold
    """
)
def _pointwise(trace, a, out):
    tensors = [value for value in a.values() if isinstance(value, Tensor)]
    for result in _results(out):
        trace.assign(result, broadcast(trace, tensors, result.shape))


@_rule(
    """
    clone contiguous detach alias _to_copy lift_fresh empty_like zeros_like ones_like full_like rand_like
    randn_like _softmax _log_softmax _safe_softmax softmax native_dropout bernoulli dropout constant normal
    uniform view_as to nan_to_num isnan positive
    """
)
def _same(trace, a, out):
    source = next(value for value in a.values() if isinstance(value, Tensor))
    for result in _results(out):
        trace.assign(result, trace.axes_of(source))


@_rule("cumsum cumprod flip roll sort tril triu _fft_r2c _fft_c2r _fft_c2c logcumsumexp")
def _order_matters(trace, a, out):
    """The same shape, but every position along some axes depends on where the others are."""
    found = trace.axes_of(a["self"])
    dims = a.get("dim", a.get("dims")) if "diagonal" not in a else [-2, -1]
    for dim in [dims] if isinstance(dims, int) else dims:
        fix(found[dim], "an operation depends on the order of its positions")
    for result in _results(out):
        kept = [x if x.size == n else Axis(n, fixed="a transform") for x, n in zip(found, result.shape)]
        trace.assign(result, kept)


@_rule(
    """
    arange zeros ones full empty rand randn linspace eye scalar_tensor new_zeros new_ones new_full new_empty
    tril_indices triu_indices randperm randint empty_strided new_empty_strided _efficientzerotensor
    """
)
def _create(trace, a, out):
    trace.assign(out, _new(out.shape))


@_rule(
    """
    item _local_scalar_dense _assert_async _assert_scalar sym_size equal is_same_size
    _has_compatible_shallow_copy_type
    """
)
def _nothing(trace, a, out):
    for result in _results(out):
        trace.assign(result, _new(result.shape))


# Reshaping and indexing


@_rule("view flatten unflatten")
def _view(trace, a, out):
    if out.dtype != a["self"].dtype and out.shape != a["self"].shape:  # view(dtype) changes the last axis
        for axis in trace.axes_of(a["self"]):
            fix(axis, "its memory is seen as another type")
        trace.assign(out, _new(out.shape, "its memory is seen as another type"))
        return
    trace.assign(out, regroup(list(trace.axes_of(a["self"])), list(out.shape)))


@_rule("permute")
def _permute(trace, a, out):
    found = trace.axes_of(a["self"])
    trace.assign(out, [found[dim] for dim in a["dims"]])


@_rule("transpose t swapaxes adjoint")
def _transpose(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    if len(found) >= 2:
        i, j = a.get("dim0", 0), a.get("dim1", 1)
        found[i], found[j] = found[j], found[i]
    trace.assign(out, found)


@_rule("unsqueeze")
def _unsqueeze(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    found.insert(a["dim"] % out.ndim, Axis(1))
    trace.assign(out, found)


@_rule("squeeze view_as_real view_as_complex")
def _squeeze(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    kept = [axis for axis in found if axis.size != 1]
    if [axis.size for axis in kept] == [size for size in out.shape if size != 1]:
        queue = iter(kept)
        return trace.assign(out, [Axis(1) if size == 1 else next(queue) for size in out.shape])
    trace.assign(out, [*found, Axis(2, fixed="real and imaginary part")] if out.ndim > len(found) else found[:-1])


@_rule("expand expand_as")
def _expand(trace, a, out):
    found = trace.axes_of(a["self"])
    result = _new(out.shape)
    for position, axis in enumerate(reversed(found), 1):
        if axis.size == out.shape[-position]:
            result[-position] = axis
    trace.assign(out, result)


@_rule("repeat tile")
def _repeat(trace, a, out):
    found = trace.axes_of(a["self"])
    found = [*_new([1] * (out.ndim - len(found))), *found]
    trace.assign(out, [product([Axis(size // max(axis.size, 1)), axis]) for axis, size in zip(found, out.shape)])


@_rule("repeat_interleave")
def _repeat_interleave(trace, a, out):
    source = a.get("self", a.get("repeats"))
    found = trace.axes_of(source)
    if a.get("dim") is None or not isinstance(a["repeats"], int):
        return _gathered(trace, [*found], out)
    result = [
        axis if axis.size == size else product([axis, Axis(size // axis.size)]) for axis, size in zip(found, out.shape)
    ]
    trace.assign(out, result)


def _gathered(trace, found: list[Axis], out: Tensor) -> None:
    """Positions were picked by data: nothing moves."""
    for axis in found:
        fix(axis, "positions are picked by data")
    for result in _results(out):
        trace.assign(result, _new(result.shape, "positions are picked by data"))


@_rule("select")
def _select(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    fix(found.pop(a["dim"]), "one of its positions is picked")
    trace.assign(out, found)


@_rule("unbind")
def _unbind(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    fix(found.pop(a["dim"]), "its positions are told apart")
    for result in out:
        trace.assign(result, found)


@_rule("slice narrow")
def _slice(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    dim, size = a["dim"], found[a["dim"]].size
    start, stop, step = slice(a["start"], a.get("end"), a.get("step", 1)).indices(size)
    if step == 1:
        found[dim] = segment(found[dim], start, max(start, stop)) if stop > start else Axis(0)
    elif size % step == 0 and start < step and stop > size - step:
        # every step-th position from `start`: one position of a last digit
        rest = regroup([found[dim]], [size // step, step])
        fix(rest[1], "one of its positions is picked")
        found[dim] = rest[0]
    else:
        fix(found[dim], "positions of it are picked")
        found[dim] = Axis(out.shape[dim], fixed="positions are picked")
    trace.assign(out, found)


@_rule("split split_with_sizes chunk tensor_split unsafe_split unsafe_chunk unsafe_split_with_sizes")
def _split(trace, a, out):
    found, start = trace.axes_of(a["self"]), 0
    dim = a["dim"] % len(found)
    for result in out:
        stop = start + result.shape[dim]
        trace.assign(result, [*found[:dim], segment(found[dim], start, stop), *found[dim + 1 :]])
        start = stop
    return None


@_rule("cat concatenate")
def _cat(trace, a, out):
    tensors = [t for t in a["tensors"] if t.shape != (0,) or out.ndim == 1]
    found = [trace.axes_of(t) for t in tensors]
    dim = a["dim"] % out.ndim
    for other in found[1:]:
        for i, (x, y) in enumerate(zip(found[0], other)):
            if i != dim:
                unify(x, y)
    trace.assign(out, [total([f[dim] for f in found]) if i == dim else x for i, x in enumerate(found[0])])


@_rule("stack")
def _stack(trace, a, out):
    found = [trace.axes_of(t) for t in a["tensors"]]
    for other in found[1:]:
        for x, y in zip(found[0], other):
            unify(x, y)
    result = list(found[0])
    result.insert(a["dim"] % out.ndim, Axis(len(found), fixed="tensors are stacked"))
    trace.assign(out, result)


@_rule(
    """
    constant_pad_nd reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d _pad_circular
    reflection_pad3d replication_pad3d
    """
)
def _pad(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    pad = a.get("pad", a.get("padding"))
    for i in range(len(pad) // 2):
        before, after = pad[2 * i], pad[2 * i + 1]
        position = len(found) - 1 - i
        axis = found[position]
        if before < 0 or after < 0:
            axis = segment(axis, max(0, -before), axis.size - max(0, -after))
        found[position] = total([Axis(max(0, before)), axis, Axis(max(0, after))])
    trace.assign(out, found)


@_rule("unfold")
def _unfold(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    if found:
        fix(found[a["dimension"]], "windows slide over it")
        found[a["dimension"]] = Axis(out.shape[a["dimension"] % len(found)], fixed="windows slide over it")
    trace.assign(out, [*found, Axis(a["size"], fixed="positions of a window")])


@_rule("diagonal")
def _diagonal(trace, a, out):
    found = trace.axes_of(a["self"])
    drop = {a["dim1"] % len(found), a["dim2"] % len(found)}
    for dim in drop:
        fix(found[dim], "its diagonal is taken")
    kept = [axis for i, axis in enumerate(found) if i not in drop]
    trace.assign(out, [*kept, Axis(out.shape[-1], fixed="a diagonal")])


@_rule("as_strided")
def _as_strided(trace, a, out):
    if out.shape == a["self"].shape and out.stride() == a["self"].stride():
        return trace.assign(out, trace.axes_of(a["self"]))
    return _gathered(trace, list(trace.axes_of(a["self"])), out)


@_rule("embedding")
def _embedding(trace, a, out):
    rows, width = trace.axes_of(a["weight"])
    fix(rows, "its positions are looked up")
    trace.made.append(width)
    trace.assign(out, [*trace.axes_of(a["indices"]), width])


@_rule("index _unsafe_index index_put _unsafe_index_put")
def _index(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    indices = list(a["indices"]) + [None] * (len(found) - len(a["indices"]))
    for axis, index in zip(found, indices):
        if index is not None:
            fix(axis, "its positions are picked by an index")
    if "values" in a:
        return trace.assign(out, found)
    given = [index for index in indices if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in given):
        kept = [axis for axis, index in zip(found, indices) if index is None]
        if out.ndim == len(kept) + 1 and [x.size for x in kept] == list(out.shape[1:]):
            return trace.assign(out, [Axis(out.shape[0], fixed="chosen by a mask"), *kept])
        return _gathered(trace, found, out)
    where = [i for i, index in enumerate(indices) if index is not None]
    shape = torch.broadcast_shapes(*(index.shape for index in given))
    picked = broadcast(trace, given, shape)
    kept = [axis for axis, index in zip(found, indices) if index is None]
    front = where[0] if where == list(range(where[0], where[-1] + 1)) else 0
    trace.assign(out, [*kept[:front], *picked, *kept[front:]])


@_rule("index_select index_add index_copy index_fill")
def _index_select(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    fix(found[a["dim"]], "its positions are picked by an index")
    if out.shape != a["self"].shape or "source" not in a:
        found[a["dim"]] = Axis(out.shape[a["dim"]], fixed="positions picked by an index")
    trace.assign(out, found)


@_rule("gather scatter scatter_add take_along_dim scatter_reduce")
def _gather(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    index = trace.axes_of(a["index"])
    dim = a["dim"] % len(found)
    fix(found[dim], "its positions are picked by an index")
    fix(index[dim], "its positions are picked by an index")
    for i, (x, y) in enumerate(zip(found, index)):
        if i != dim and x.size == y.size:
            unify(x, y)
        elif i != dim:
            fix(x, "positions of it are picked")
            fix(y, "positions of it are picked")
    trace.assign(out, index if out.shape == a["index"].shape else found)


# Contractions


@_rule("mm bmm addmm baddbmm matmul dot mv addmv vdot")
def _matmul(trace, a, out):
    left = a.get("mat1", a.get("batch1", a.get("mat", a["self"])))
    right = a.get("mat2", a.get("batch2", a.get("vec2", a.get("tensor", a.get("vec", a.get("other"))))))
    x, y = trace.axes_of(left), trace.axes_of(right)
    unify(x[-1], y[-2] if len(y) > 1 else y[-1])
    if trace.learned(right) and len(y) > 1:
        trace.made.append(y[-1])
    elif trace.learned(left) and len(x) > 1:
        trace.made.append(x[-2])
    if len(x) == 3:
        unify(x[0], y[0])
        mark_grouping(x[0])
    result = [*x[:-1], *(y[-1:] if len(y) > 1 else ())]
    if left is not a["self"]:
        trace.assign(out, _with_bias(trace, a["self"], result))
    else:
        trace.assign(out, result)


def _with_bias(trace, bias: Tensor | None, result: list[Axis]) -> list[Axis]:
    if bias is not None:
        for x, y in zip(reversed(trace.axes_of(bias)), reversed(result)):
            if x.size == y.size:
                unify(x, y)
    return result


@_rule("linear")
def _linear(trace, a, out):
    x, w = trace.axes_of(a["input"]), trace.axes_of(a["weight"])
    unify(x[-1], w[-1])
    trace.made += w[:-1]
    trace.assign(out, _with_bias(trace, a["bias"], [*x[:-1], *w[:-1]]))


@_rule("scaled_dot_product_attention")
def _attention(trace, a, out):
    q, k, v = (trace.axes_of(a[name]) for name in ("query", "key", "value"))
    unify(q[-1], k[-1])
    unify(k[-2], v[-2])
    for i in range(len(q) - 2):
        if q[i].size == k[i].size == v[i].size:
            unify(q[i], k[i])
            unify(q[i], v[i])
        else:  # grouped queries: several heads share a key
            for axis in (q[i], k[i], v[i]):
                fix(axis, "heads of queries share heads of keys")
    if len(q) > 2:
        mark_grouping(q[-3])
    mask = a.get("attn_mask", a.get("attn_bias"))
    if isinstance(mask, Tensor):
        scores = [*q[:-1], k[-2]]
        for x, y in zip(reversed(trace.axes_of(mask)), reversed(scores)):
            if x.size == y.size:
                unify(x, y)
    result, *others = _results(out)
    trace.assign(result, [*q[:-1], v[-1]])
    for other in others:
        known = [*q[:-1], k[-2]]
        trace.assign(
            other, [known[i] if i < len(known) and known[i].size == n else Axis(n) for i, n in enumerate(other.shape)]
        )


@_rule("convolution _convolution cudnn_convolution mkldnn_convolution convolution_overrideable")
def _convolution(trace, a, out):
    x, w = trace.axes_of(a["input"] if "input" in a else a["self"]), trace.axes_of(a["weight"])
    groups = a["groups"]
    inside, outside = (0, 1) if a.get("transposed") else (1, 0)
    batched = len(x) == len(w)
    x = x if batched else (Axis(1), *x)
    which = Axis(groups)
    if groups > 1:
        # The axis that runs over all groups is (group, within); the other one is within a group only.
        mark_grouping(which)
        if a.get("transposed"):
            unify(w[0], x[1])
            which, _ = regroup([w[0]], [groups, w[0].size // groups])
            result = product([which, w[1]])
        else:
            which, _ = regroup([w[0]], [groups, w[0].size // groups])
            unify(x[1], product([which, w[1]]))
            result = w[0]
        mark_grouping(which)
    else:
        unify(x[1], w[inside])
        result = w[outside]
    if isinstance(a.get("bias"), Tensor):
        unify(trace.axes_of(a["bias"])[0], result)
    if trace.learned(a["weight"]):
        trace.made.append(result)
    for axis in w[2:]:
        fix(axis, "it is an axis of a convolution's window")
    kept = [x[0], result, *_windowed(x[2:], out.shape[-len(w) + 2 :])]
    trace.assign(out, kept if batched else kept[1:])
    return {groups: which} if groups > 1 else None


def _windowed(found, sizes) -> list[Axis]:
    """Axes that a window slid over."""
    result = []
    for axis, size in zip(found, sizes):
        if axis.size != size:
            fix(axis, "a window slides over it")
            axis = Axis(size, fixed="a window slides over it")
        result.append(axis)
    return result


@_rule(
    """
    max_pool2d_with_indices avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d avg_pool1d avg_pool3d
    adaptive_max_pool3d _adaptive_avg_pool3d max_pool3d_with_indices adaptive_avg_pool1d max_pool2d
    upsample_bilinear2d upsample_nearest2d upsample_bicubic2d upsample_linear1d upsample_nearest1d
    _upsample_bilinear2d_aa _upsample_bicubic2d_aa upsample_trilinear3d mkldnn_max_pool2d
    _upsample_nearest_exact2d adaptive_avg_pool2d
    """
)
def _pool(trace, a, out):
    found = trace.axes_of(a["self"])
    for result in _results(out):
        trace.assign(result, _windowed(found, result.shape))


@_rule("grid_sampler_2d grid_sampler")
def _grid_sample(trace, a, out):
    x, grid = trace.axes_of(a["input"]), trace.axes_of(a["grid"])
    unify(x[0], grid[0])
    for axis in (*x[2:], *grid[1:]):
        fix(axis, "positions are sampled")
    trace.assign(out, [*x[:2], *grid[1:-1]])


@_rule("pixel_shuffle")
def _pixel_shuffle(trace, a, out):
    r = a["upscale_factor"]
    *batch, c, h, w = trace.axes_of(a["self"])
    channel, i, j = regroup([c], [c.size // r**2, r, r])
    for axis in (i, j):
        fix(axis, "channels become pixels")
    trace.assign(out, [*batch, channel, product([h, i]), product([w, j])])


@_rule("pixel_unshuffle")
def _pixel_unshuffle(trace, a, out):
    r = a["downscale_factor"]
    *batch, c, h, w = trace.axes_of(a["self"])
    (h, i), (w, j) = regroup([h], [h.size // r, r]), regroup([w], [w.size // r, r])
    for axis in (i, j):
        fix(axis, "pixels become channels")
    trace.assign(out, [*batch, product([c, i, j]), h, w])


@_rule("im2col")
def _im2col(trace, a, out):
    *batch, c, h, w = trace.axes_of(a["self"])
    for axis in (h, w):
        fix(axis, "a window slides over it")
    window = Axis(prod(a["kernel_size"]), fixed="positions of a window")
    trace.assign(out, [*batch, product([c, window]), Axis(out.shape[-1], fixed="windows")])


@_rule("col2im")
def _col2im(trace, a, out):
    *batch, c, n = trace.axes_of(a["self"])
    window = prod(a["kernel_size"])
    channel, positions = regroup([c], [c.size // window, window])
    for axis in (positions, n):
        fix(axis, "positions of a window")
    trace.assign(out, [*batch, channel, *_new(out.shape[-2:], "pixels")])


# Norms and reductions


@_rule(
    """
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training cudnn_batch_norm
    _batch_norm_with_update _batch_norm_no_update _native_batch_norm_legit_functional batch_norm
    """
)
def _batch_norm(trace, a, out):
    found = trace.axes_of(a["input"])
    for name in ("weight", "bias", "running_mean", "running_var"):
        if isinstance(a.get(name), Tensor):
            unify(found[1], trace.axes_of(a[name])[0])
    result, *others = _results(out)
    trace.assign(result, found)
    for other in others:
        trace.assign(other, [found[1] if n == found[1].size else Axis(n) for n in other.shape])


@_rule("native_layer_norm _fused_rms_norm rms_norm layer_norm")
def _layer_norm(trace, a, out):
    found = trace.axes_of(a["input"])
    for name in ("weight", "bias"):
        if isinstance(a.get(name), Tensor):
            for x, y in zip(reversed(found), reversed(trace.axes_of(a[name]))):
                unify(x, y)
    result, *others = _results(out)
    trace.assign(result, found)
    for other in others:
        trace.assign(other, [axis if axis.size == n else Axis(n) for axis, n in zip(found, other.shape)])


@_rule("native_group_norm group_norm")
def _group_norm(trace, a, out):
    found, groups = trace.axes_of(a["input"]), a.get("group", a.get("num_groups"))
    for name in ("weight", "bias"):
        if isinstance(a.get(name), Tensor):
            unify(found[1], trace.axes_of(a[name])[0])
    which, _ = regroup([found[1]], [groups, found[1].size // groups])
    mark_grouping(which)
    result, *others = _results(out)
    trace.assign(result, found)
    for other in others:
        trace.assign(other, [axis if axis.size == n else Axis(n) for axis, n in zip((found[0], which), other.shape)])
    return {groups: which} if groups > 1 else None


@_rule("_weight_norm_interface _weight_norm")
def _weight_norm(trace, a, out):
    v, g, dim = trace.axes_of(a["v"]), trace.axes_of(a["g"]), a["dim"]
    unify(v[dim], g[dim])
    result, *others = _results(out)
    trace.assign(result, v)
    for other in others:
        trace.assign(other, [x if x.size == n else Axis(n) for x, n in zip(g, other.shape)])


@_rule(
    """
    sum mean amax amin max min var std var_mean std_mean prod norm any all linalg_vector_norm logsumexp argmax
    argmin median topk nansum count_nonzero aminmax
    """
)
def _reduce(trace, a, out):
    tensors = [value for value in a.values() if isinstance(value, Tensor)]
    if len(tensors) > 1:  # max(a, b)
        return _pointwise(trace, a, out)
    found = trace.axes_of(tensors[0])
    dims = a.get("dim")
    dims = list(range(len(found))) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    dims = {dim % max(len(found), 1) for dim in dims}
    if "k" in a or any(not r.is_floating_point() for r in _results(out)):
        for dim in dims:
            if found:
                fix(found[dim], "the order of its positions matters")
    for result in _results(out):
        if result.ndim == len(found):
            kept = [
                Axis(n, fixed="a reduction") if i in dims else x for i, (x, n) in enumerate(zip(found, result.shape))
            ]
        else:
            kept = [x for i, x in enumerate(found) if i not in dims]
        trace.assign(result, kept)
