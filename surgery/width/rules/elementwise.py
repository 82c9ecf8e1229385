"""Operations that act element by element, keep a shape or create a tensor."""

import torch

from surgery.width.axes import Axis, find, fix, picked, role, segment, unify
from surgery.width.rules.registry import INDICES, RuleResult, broadcast, dims_of, fresh, results, rule, tensors


@rule("copy", layout=True)
@rule(
    """
    where masked_fill lerp addcmul addcdiv fill zero _prelu_kernel rsub hardswish hardtanh hardsigmoid
    leaky_relu elu gelu silu mish softplus log_sigmoid_forward celu clamp rrelu_with_noise threshold complex
    polar floor_divide
    """,
    tag=torch.Tag.pointwise,
)
def pointwise(view, args, out):
    """Say that each element of the result is computed of the elements in its place."""
    return [broadcast(view, tensors(args), result.shape) for result in results(out)]


@rule("clone detach alias _to_copy lift_fresh empty_like", layout=True)
@rule(
    """
    zeros_like ones_like full_like rand_like randn_like randint_like _softmax _log_softmax _safe_softmax
    native_dropout _fused_dropout bernoulli normal uniform exponential cauchy geometric log_normal
    random nan_to_num isnan embedding_renorm renorm
    """,
    sizes={"size", "fill_value"},
)
def _same(view, args, out):
    return view.axes_of([*tensors(args), out][0])


@rule("cumsum cumprod cummax cummin flip roll rot90 tril triu _fft_r2c _fft_c2r _fft_c2c logcumsumexp")
def _order_matters(view, args, out):
    """Keep the shape; along some axes the order of positions matters."""
    axes = view.axes_of(args["self"])
    along = [-2, -1] if "diagonal" in args else dims_of(args, len(axes))
    for dim in along if axes else ():
        fix(axes[dim], picked("an operation depends on the order of its positions"))
    return [
        [x if x.size == size else Axis(size, role("a transform")) for x, size in zip(axes, result.shape)]
        for result in results(out)
    ]


@rule("sort")
def _sort(view, args, out):
    """Sort: ranks replace positions, and of fewer positions there are the first ranks."""
    axes = view.axes_of(args["self"])
    along = [axes[dim] for dim in dims_of(args, len(axes)) if axes]
    why = "it is sorted, so that its positions are ranks (the code may take the first k)"
    return RuleResult(axes, prefix_only=along, order=why, fixed_when_read=[(axis, INDICES) for axis in along])


@rule("eye", sizes={"n", "m"})
def _identity(view, args, out):
    """Make an identity matrix: any positions, in rows and columns alike, give one."""
    rows, columns = fresh(out.shape)
    if rows.size == columns.size:
        return rows, rows
    return RuleResult([rows, columns], prefix_only=[rows, columns])


@rule("hann_window hamming_window", sizes={"window_length"})
@rule("arange linspace", sizes={"start", "end", "step", "steps"})
def _count(view, args, out):
    positions = fresh(out.shape)
    return RuleResult(positions, prefix_only=positions)


@rule("glu")
def _glu(view, args, out):
    axes = list(view.axes_of(args["self"]))
    dim, half = args["dim"], out.shape[args["dim"]]
    head, gate = segment(axes[dim], 0, half), segment(axes[dim], half, 2 * half)
    unify(head, gate)
    axes[dim] = find(head)
    return axes


# What fills a tensor may be computed from a width, as a bound may.
@rule("full randint randperm", sizes={"size", "fill_value", "n", "m", "low", "high"})
@rule(
    """
    zeros ones empty rand randn scalar_tensor new_zeros new_ones new_full new_empty tril_indices triu_indices
    empty_strided new_empty_strided _efficientzerotensor empty_permuted
    """,
    sizes={"size", "stride", "fill_value", "s"},
)
def _create(view, args, out):
    return fresh(out.shape)


@rule(
    """
    _local_scalar_dense _assert_async _assert_scalar _assert_tensor_metadata equal is_same_size allclose
    _functional_assert_async _linalg_check_errors
    """
)
def _nothing(view, args, out):
    return [fresh(result.shape) for result in results(out)]
