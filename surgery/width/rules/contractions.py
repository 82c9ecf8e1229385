"""Sums over pairs of axes: matrix products, attention, convolutions."""

from torch import Tensor

from surgery.width.axes import Axis, fix, mark_grouping, product, regroup, unify
from surgery.width.rules.registry import results, rule, windowed
from surgery.width.why import lost, role


@rule("mm bmm addmm baddbmm matmul dot mv addmv vdot")
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
        mark_grouping(x[0], "heads")
    result = [*x[:-1], *(y[-1:] if len(y) > 1 else ())]
    trace.summed[out] = x[-1]
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


@rule("linear")
def _linear(trace, a, out):
    x, w = trace.axes_of(a["input"]), trace.axes_of(a["weight"])
    unify(x[-1], w[-1])
    trace.made += w[:-1]
    trace.assign(out, _with_bias(trace, a["bias"], [*x[:-1], *w[:-1]]))


@rule("scaled_dot_product_attention")
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
                fix(axis, lost("heads of queries share heads of keys"))
    if len(q) > 2:
        mark_grouping(q[-3], "heads")
    mask = a.get("attn_mask", a.get("attn_bias"))
    if isinstance(mask, Tensor):
        scores = [*q[:-1], k[-2]]
        for x, y in zip(reversed(trace.axes_of(mask)), reversed(scores)):
            if x.size == y.size:
                unify(x, y)
    result, *others = results(out)
    trace.assign(result, [*q[:-1], v[-1]])
    for other in others:
        known = [*q[:-1], k[-2]]
        trace.assign(
            other, [known[i] if i < len(known) and known[i].size == n else Axis(n) for i, n in enumerate(other.shape)]
        )


@rule("convolution _convolution cudnn_convolution mkldnn_convolution convolution_overrideable")
def _convolution(trace, a, out):
    x, w = trace.axes_of(a["input"] if "input" in a else a["self"]), trace.axes_of(a["weight"])
    groups = a["groups"]
    inside, outside = (0, 1) if a.get("transposed") else (1, 0)
    batched = len(x) == len(w)
    x = x if batched else (Axis(1), *x)
    which = Axis(groups)
    if groups > 1:
        # The axis that runs over all groups is (group, within); the other one is within a group only.
        mark_grouping(which, "groups")
        if a.get("transposed"):
            unify(w[0], x[1])
            which, _ = regroup([w[0]], [groups, w[0].size // groups])
            result = product([which, w[1]])
        else:
            which, _ = regroup([w[0]], [groups, w[0].size // groups])
            unify(x[1], product([which, w[1]]))
            result = w[0]
        mark_grouping(which, "groups")
    else:
        unify(x[1], w[inside])
        result = w[outside]
    if isinstance(a.get("bias"), Tensor):
        unify(trace.axes_of(a["bias"])[0], result)
    if trace.learned(a["weight"]):
        trace.made.append(result)
    for axis in w[2:]:
        fix(axis, role("it is an axis of a convolution's window"))
    window = [axis.size for axis in w[2:]]
    kept = [x[0], result, *windowed(trace, x[2:], out.shape[-len(w) + 2 :], window)]
    trace.assign(out, kept if batched else kept[1:])
    return {"groups": which} if groups > 1 else None
