"""Sums over pairs of axes (products, attention, convolutions), and factorisations."""

from torch import Tensor

from surgery.width.axes import Axes, Axis, find, fix, lost, mark_grouping, picked, place, product, regroup, role, unify
from surgery.width.rules.notation import rule_of
from surgery.width.rules.registry import (
    RuleResult,
    View,
    broadcast_axes,
    first,
    fitting,
    fix_all,
    fresh,
    results,
    rule,
    slide_window,
    split_groups,
    tensors,
    unify_all,
    unify_last,
)

for _name, _notation in {
    "mm": "self: i k, mat2: k j -> i j",
    "bmm": "self: heads i k, mat2: heads k j -> heads i j",
    "addmm": "self: [i j], mat1: i k, mat2: k j -> i j",
    "baddbmm": "self: [heads i j], batch1: heads i k, batch2: heads k j -> heads i j",
    "mv": "self: i k, vec: k -> i",
    "addmv": "self: [i], mat: i k, vec: k -> i",
    "dot": "self: k, tensor: k ->",
    "vdot": "self: k, other: k ->",
    "addr": "self: [i j], vec1: i, vec2: j -> i j",
}.items():
    rule(_name)(rule_of(_notation, _name))


@rule("_trilinear")
def _bilinear(view, args, out):
    """Multiply three tensors with singleton axes inserted, and sum."""
    operands, learned = [], []
    for i in (1, 2, 3):
        axes = list(view.axes_of(args[f"i{i}"]))
        if view.is_weight(args[f"i{i}"]):
            learned += axes
        for dim in sorted(args[f"expand{i}"]):
            axes.insert(dim, Axis(1))
        operands.append(axes)
    whole = broadcast_axes(
        operands, [max(sizes) for sizes in zip(*([axis.size for axis in axes] for axes in operands))]
    )
    result = [axis for dim, axis in enumerate(whole) if dim not in args["sumdim"]]
    return RuleResult(result, features=[axis for axis in result if axis in map(find, learned)])


@rule("_grouped_mm")
def _grouped_product(view, args, out):
    """Multiply rows, sorted by groups as tokens by experts, with each group's matrix."""
    x, (groups, rows, columns) = view.axes_of(args["self"]), view.axes_of(args["mat2"])
    if len(x) != 2 or args["bias"] is not None:
        return fix_all(view, tensors(args), out)
    unify(x[-1], rows)
    fix(groups, role("each position is a matrix of its own"))
    return RuleResult([x[0], columns], features=[columns] if view.is_weight(args["mat2"]) else [], summed=rows)


@rule("_cdist_forward _euclidean_dist")
def _distances(view, args, out):
    x, y = view.axes_of(args["x1"]), view.axes_of(args["x2"])
    unify(x[-1], y[-1])
    return [*broadcast_axes([x[:-2], y[:-2]], out.shape[:-2]), x[-2], y[-2]]


@rule("_pdist_forward")
def _distances_within(view, args, out):
    fix(view.axes_of(args["self"])[0], picked("its positions are compared in pairs"))
    return fresh(out.shape, role("pairs of positions"))


@rule(
    "scaled_dot_product_attention",
    same="""
    _scaled_dot_product_attention_math_for_mps _scaled_dot_product_cudnn_attention
    _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable
    """,
)
def _attention(view, args, out):
    q, k, v = (view.axes_of(args[name]) for name in ("query", "key", "value"))
    unify(q[-1], k[-1])
    unify(k[-2], v[-2])
    for of_q, of_k, of_v in zip(q[:-2], k[:-2], v[:-2]):
        if of_q.size == of_k.size == of_v.size:
            unify(of_q, of_k)
            unify(of_q, of_v)
        else:  # grouped queries: several heads share a key
            for axis in (of_q, of_k, of_v):
                fix(axis, lost("heads of queries share heads of keys"))
    if len(q) > 2:
        mark_grouping(q[-3], "heads")
    scores = (*q[:-1], k[-2])
    mask = first(args, "attn_mask attn_bias")
    if isinstance(mask, Tensor):
        unify_last(view.axes_of(mask), scores)
    _, *others = results(out)
    return [(*q[:-1], v[-1]), *(fitting(scores, other.shape) for other in others)]


@rule("mkldnn_rnn_layer")
def _recurrent(view, args, out):
    """Compute one layer and direction of an LSTM, with four gates in its weights."""
    x, of_input, of_hidden = (view.axes_of(args[name]) for name in ("input", "weight0", "weight1"))
    hidden = of_hidden[1]
    gate, within = regroup([of_hidden[0]], [of_hidden[0].size // hidden.size, hidden.size])
    fix(gate, role("it numbers the gates"))
    unify(within, hidden)
    unify(x[-1], of_input[1])
    for rows in (of_input[0], *(view.axes_of(args[name])[0] for name in ("weight2", "weight3"))):
        unify(rows, of_hidden[0])
    states = [view.axes_of(args[name]) for name in ("hx_", "cx_")]
    unify_all([(x[1], hidden), *(state[-2:] for state in states)])
    _, _, _, *workspace = results(out)
    axes = [(*x[:-1], hidden), *states, *(fresh(tensor.shape) for tensor in workspace)]
    return RuleResult(axes, {"hidden_size": hidden}, features=[hidden])


@rule("convolution _convolution cudnn_convolution mkldnn_convolution convolution_overrideable")
def _convolution(view, args, out):
    image, weight = first(args, "input self"), args["weight"]
    return _convolve(view, view.axes_of(image), weight, args.get("bias"), args["groups"], out, args.get("transposed"))


@rule("torchvision::deform_conv2d")
def _deform(view, args, out):
    x, offset = view.axes_of(args["input"]), view.axes_of(args["offset"])
    mask = [view.axes_of(args["mask"])] if args["use_mask"] else []
    for axes in (offset, *mask):
        unify(x[0], axes[0])
        for axis in axes[1:]:
            fix(axis, role("it says where pixels are read"))
    for axis in x[2:]:
        fix(axis, role("its pixels are read one by one"))
    if args["offset_groups"] > 1:
        which, _ = split_groups(x[1], args["offset_groups"])
        fix(which, role("its groups are read at places of their own"))
    convolved = _convolve(view, x, args["weight"], args["bias"], args["groups"], out)
    return convolved._replace(sizes={}, axes=[*convolved.axes[:2], *offset[2:]])


def _convolve(
    view: View, x: Axes, weight: Tensor, bias: Tensor | None, groups: int, out, transposed=False
) -> RuleResult:
    """Slide a window over an image.

    Its weight is (out, in / groups) or transposed (in, out / groups).
    """
    w = view.axes_of(weight)
    if groups == 1:
        inside, result = (w[0], w[1]) if transposed else (w[1], w[0])
        unify(x[1], inside)
    else:  # the axis that runs over all groups is (group, within); the other one is within a group only
        if transposed:
            unify(w[0], x[1])
        which, _ = split_groups(w[0], groups)
        result = product([which, w[1]]) if transposed else w[0]
        if not transposed:
            unify(x[1], product([which, w[1]]))
        mark_grouping(which, "groups")
    if isinstance(bias, Tensor):
        unify(view.axes_of(bias)[0], result)
    for axis in w[2:]:
        fix(axis, place("it is an axis of a convolution's window"))
    pixels, ordered = slide_window(x[2:], out.shape[2 - len(w) :], [axis.size for axis in w[2:]])
    features = [result] if view.is_weight(weight) else []
    sizes = {"groups": which} if groups > 1 else {}
    return RuleResult([x[0], result, *pixels], sizes, features, ordered)


@rule(
    """
    linalg_inv_ex linalg_qr _linalg_svd _linalg_eigh linalg_eig linalg_cholesky_ex cholesky _linalg_det
    _linalg_slogdet linalg_lu linalg_lu_factor_ex _linalg_solve_ex linalg_householder_product
    linalg_matrix_exp linalg_pinv linalg_lstsq cholesky_solve cholesky_inverse geqrf linalg_ldl_factor_ex
    """
)
def _factor(view, args, out):
    for axis in (axis for tensor in tensors(args) for axis in view.axes_of(tensor)):
        fix(axis, _AS_A_WHOLE)
    return [fresh(result.shape, _AS_A_WHOLE) for result in results(out)]


@rule("linalg_solve_triangular")
def _solve(view, args, out):
    """Solve with matrices side by side, each column of the right side by itself.

    So do the chunks of a gated delta rule.
    """
    matrix, right = view.axes_of(args["self"]), view.axes_of(args["B"])
    for axis in (*matrix[-2:], right[-2 if args["left"] else -1]):
        fix(axis, _AS_A_WHOLE)
    return [*broadcast_axes([matrix[:-2], right[:-2]], out.shape[:-2]), *right[-2:]]


_AS_A_WHOLE = role("a matrix is factored or inverted as a whole")
