"""Operations element by element, and those that keep a shape or create a tensor."""

from torch import Tensor

from surgery.width.axes import Axis, find, fix, segment, unify
from surgery.width.rules.registry import broadcast, fresh, results, rule
from surgery.width.why import picked, role


@rule(
    """
    where masked_fill copy lerp addcmul addcdiv fill zero _prelu_kernel rsub hardswish hardtanh hardsigmoid
    leaky_relu elu gelu silu mish softplus log_sigmoid_forward relu6 celu clamp rrelu_with_noise threshold
    """
)
def pointwise(trace, a, out):
    tensors = [value for value in a.values() if isinstance(value, Tensor)]
    for result in results(out):
        trace.assign(result, broadcast(trace, tensors, result.shape))


@rule(
    """
    clone contiguous detach alias _to_copy lift_fresh empty_like zeros_like ones_like full_like rand_like
    randn_like _softmax _log_softmax _safe_softmax softmax native_dropout bernoulli dropout constant normal
    uniform view_as to nan_to_num isnan positive
    """
)
def _same(trace, a, out):
    source = next(value for value in a.values() if isinstance(value, Tensor))
    for result in results(out):
        trace.assign(result, trace.axes_of(source))


@rule("cumsum cumprod flip roll sort tril triu _fft_r2c _fft_c2r _fft_c2c logcumsumexp")
def _order_matters(trace, a, out):
    """The shape stays the same, but along some axes the order of positions matters."""
    found = trace.axes_of(a["self"])
    dims = a.get("dim", a.get("dims")) if "diagonal" not in a else [-2, -1]
    if dims in (None, []):
        dims = range(len(found))  # over all, flattened
    for dim in [dims] if isinstance(dims, int) else dims:
        fix(found[dim], picked("an operation depends on the order of its positions"))
    for result in results(out):
        kept = [x if x.size == n else Axis(n, role("a transform")) for x, n in zip(found, result.shape)]
        trace.assign(result, kept)


@rule("arange linspace")
def _count(trace, a, out):
    trace.assign(out, fresh(out.shape))
    trace.ordered += trace.axes_of(out)


@rule("glu")
def _glu(trace, a, out):
    found = list(trace.axes_of(a["self"]))
    dim, half = a["dim"], out.shape[a["dim"]]
    first, second = segment(found[dim], 0, half), segment(found[dim], half, 2 * half)
    unify(first, second)
    found[dim] = find(first)
    trace.assign(out, found)


@rule(
    """
    zeros ones full empty rand randn eye scalar_tensor new_zeros new_ones new_full new_empty
    tril_indices triu_indices randperm randint empty_strided new_empty_strided _efficientzerotensor
    """
)
def _create(trace, a, out):
    trace.assign(out, fresh(out.shape))


@rule(
    """
    item _local_scalar_dense _assert_async _assert_scalar sym_size equal is_same_size
    _has_compatible_shallow_copy_type
    """
)
def _nothing(trace, a, out):
    for result in results(out):
        trace.assign(result, fresh(result.shape))
