"""Norms and reductions."""

from torch import Tensor

from surgery.width.axes import Axis, fix, mark_grouping, regroup, unify
from surgery.width.rules.elementwise import pointwise
from surgery.width.rules.registry import results, rule
from surgery.width.why import picked, role


@rule(
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
    result, *others = results(out)
    trace.assign(result, found)
    for other in others:
        trace.assign(other, [found[1] if n == found[1].size else Axis(n) for n in other.shape])
    return {"num_features": found[1]}


@rule("native_layer_norm _fused_rms_norm rms_norm layer_norm")
def _layer_norm(trace, a, out):
    found = trace.axes_of(a["input"])
    for name in ("weight", "bias"):
        if isinstance(a.get(name), Tensor):
            for x, y in zip(reversed(found), reversed(trace.axes_of(a[name]))):
                unify(x, y)
    result, *others = results(out)
    trace.assign(result, found)
    for other in others:
        trace.assign(other, [axis if axis.size == n else Axis(n) for axis, n in zip(found, other.shape)])
    return {"normalized_shape": list(found[-len(a["normalized_shape"]) :])}


@rule("native_group_norm group_norm")
def _group_norm(trace, a, out):
    found, groups = trace.axes_of(a["input"]), a.get("group", a.get("num_groups"))
    for name in ("weight", "bias"):
        if isinstance(a.get(name), Tensor):
            unify(found[1], trace.axes_of(a[name])[0])
    which, _ = regroup([found[1]], [groups, found[1].size // groups])
    mark_grouping(which, "groups")
    result, *others = results(out)
    trace.assign(result, found)
    for other in others:
        trace.assign(other, [axis if axis.size == n else Axis(n) for axis, n in zip((found[0], which), other.shape)])
    grouped = {"group": which, "num_groups": which} if groups > 1 else {}
    return {"num_channels": found[1], **grouped}


@rule("_weight_norm_interface _weight_norm")
def _weight_norm(trace, a, out):
    v, g, dim = trace.axes_of(a["v"]), trace.axes_of(a["g"]), a["dim"]
    unify(v[dim], g[dim])
    result, *others = results(out)
    trace.assign(result, v)
    for other in others:
        trace.assign(other, [x if x.size == n else Axis(n) for x, n in zip(g, other.shape)])


@rule(
    """
    sum mean amax amin max min var std var_mean std_mean prod norm any all linalg_vector_norm logsumexp argmax
    argmin median topk nansum count_nonzero aminmax
    """
)
def _reduce(trace, a, out):
    tensors = [value for value in a.values() if isinstance(value, Tensor)]
    if len(tensors) > 1:  # max(a, b)
        return pointwise(trace, a, out)
    found = trace.axes_of(tensors[0])
    dims = a.get("dim")
    dims = list(range(len(found))) if dims in (None, []) else [dims] if isinstance(dims, int) else dims
    dims = {dim % max(len(found), 1) for dim in dims}
    if "k" in a or any(not r.is_floating_point() for r in results(out)):
        for dim in dims:
            if found:
                fix(found[dim], picked("the order of its positions matters"))
    for result in results(out):
        if result.ndim == len(found):
            kept = [
                Axis(n, role("a reduction")) if i in dims else x for i, (x, n) in enumerate(zip(found, result.shape))
            ]
        else:
            kept = [x for i, x in enumerate(found) if i not in dims]
        trace.assign(result, kept)
