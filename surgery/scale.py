"""Scale: models of different architectures brought to one norm, tensor by tensor, before they are averaged.

FedFA (Flexible Architectures, ECML-PKDD 2024; two other methods share the name), Algorithm 1, lines 12-22. Small
models have larger weights than large ones, and would drown them in the mean.
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

import torch
from torch import Tensor

from surgery.average import checked_mask
from surgery.errors import SurgeryError
from surgery.state import Stack, compute_dtype, count

_BATCH = 1 << 20  # elements; a larger stack goes model by model, so that its copy stays small
_CHUNK = 1 << 16  # elements; squares are summed in float64 within the cache


def percentile_norm(tensor: Tensor, q: float = 0.95, stacked: bool = False) -> Tensor:
    """The L2 norm of the entries whose magnitude is at most the q-quantile of the magnitudes (W95 of the paper).

    The quantile is the linearly interpolated one, at position q (n - 1) of the n sorted magnitudes. It lies at or
    above the entry below that position and under the next one, so that entry is an exact threshold: there is no
    limit to n, and no rounding. (The paper does not say whether signed or absolute values are ranked; these are
    absolute.)

    Args:
        tensor: floating or complex, of any shape. An empty one has norm 0.
        q: in [0, 1]; 1 is the norm of the whole tensor.
        stacked: the tensor is [K, *S] and each entry has a norm of its own.

    Returns:
        A scalar, or [K]; in float32 at least, and summed in float64. Without data (meta device) only its shape.

    Raises:
        SurgeryError: for q out of range, integers, and tensors that hold NaN or infinity.

    >>> percentile_norm(torch.tensor([3.0, -4.0, 100.0]), q=0.5)
    tensor(5.)
    >>> percentile_norm(torch.tensor([[3.0, -4.0], [0.0, 2.0]]), q=1.0, stacked=True)
    tensor([5., 2.])
    """
    _check_quantile(q)
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise SurgeryError(f"a tensor of {tensor.dtype} has no percentile norm: convert it to float first")
    if stacked and not tensor.ndim:
        raise SurgeryError("a scalar is no stack: give a tensor [K, *S] or stacked=False")
    models = {"the tensor": tensor if stacked else tensor[None]}
    norms = _group_norms(models, tuple(models), {}, q).to(_real(tensor.dtype))
    return norms if stacked else norms[0]


def match_norms(
    models: Mapping[str, Tensor],
    mask: Mapping[str, Tensor] | None = None,
    q: float = 0.95,
    groups: Sequence[Sequence[str]] | None = None,
) -> tuple[Stack, dict[str, Tensor]]:
    """Scale the models of a stack, tensor by tensor, to the mean of their percentile norms.

    Model c is multiplied by alpha_c = mean_k ||Wq_k|| / ||Wq_c|| (Alg. 1, line 18), where Wq holds the entries that
    `percentile_norm` counts. Averaging the result with weights n_c and a mask is the scalable aggregation of lines
    19-22.

    Args:
        models: a stack, tensors [K, *S].
        mask: boolean tensors as `average` takes them. A model's norm runs over the elements that it covers and
            over nothing else; all its elements are scaled. Names left out are covered entirely.
        q: the quantile, in [0, 1].
        groups: names that have one norm and one factor together, as `segments(layers(model))` gives them. Tensors
            in no group are left as they are, so `[(n,) for n in parameters]` leaves norm statistics alone. Default:
            each floating tensor on its own.

    Returns:
        The scaled stack, which shares no memory with the input, and the factors [K] (float32 at least) by name of
        each tensor that was scaled. Integer and boolean tensors are copied. A model whose norm is 0, because it
        covers nothing of the group or only zeros, gets factor 1 and is not counted in the mean: the paper divides
        by 0 there.

    Raises:
        SurgeryError: for q out of range, groups that name a tensor twice or one that the stack has not, masks that do
            not fit, covered elements that are NaN or infinite, and factors too large for their dtype.

    >>> scaled, factors = match_norms({"w": torch.tensor([[3.0, 4.0], [6.0, 8.0]])}, q=1.0)
    >>> factors["w"], scaled["w"].norm(dim=1)
    (tensor([1.5000, 0.7500]), tensor([7.5000, 7.5000]))
    """
    k = count(models)
    _check_quantile(q)
    mask = {} if mask is None else {name: checked_mask(name, m, models) for name, m in mask.items()}
    result, factors = {}, {}
    for group in _floating_groups(models, groups):
        norms = _group_norms(models, group, mask, q)
        counted = norms > 0
        total = torch.where(counted, norms, torch.zeros_like(norms)).sum()
        alpha = torch.where(counted, total / counted.sum().clamp(min=1) / norms, torch.ones_like(norms))
        for name in group:
            tensor = models[name]
            factors[name] = alpha.to(tensor.device, _real(tensor.dtype))
            if not tensor.is_meta and not bool(factors[name].isfinite().all()):
                raise SurgeryError(f"norms of {name!r} from {norms.min()} to {norms.max()} cannot be matched in float")
            shape = (k, *[1] * (tensor.ndim - 1))
            result[name] = (tensor.detach() * factors[name].view(shape)).to(tensor.dtype)
    # In the order of the stack; whatever belongs to no group is copied, so that nothing is shared.
    return {n: result[n] if n in result else tensor.clone() for n, tensor in models.items()}, factors


def _floating_groups(models: Mapping[str, Tensor], groups: Sequence[Sequence[str]] | None) -> list[tuple[str, ...]]:
    """The groups without integers and empty groups; SurgeryError for unknown or repeated names."""
    groups = [(name,) for name in models] if groups is None else [tuple(group) for group in groups]
    seen: set[str] = set()
    for name in (name for group in groups for name in group):
        if name not in models:
            raise SurgeryError(f"groups name {name!r}, which the stack has not")
        if name in seen:
            raise SurgeryError(f"tensor {name!r} is in two groups: it can have only one factor")
        seen.add(name)
    floating = {name for name, tensor in models.items() if tensor.is_floating_point() or tensor.is_complex()}
    groups = [tuple(name for name in group if name in floating) for group in groups]
    return [group for group in groups if group]


def _group_norms(models: Mapping[str, Tensor], names: Sequence[str], mask: Mapping[str, Tensor], q: float) -> Tensor:
    """The percentile norm of each model over these tensors together: [K], float64, on the first one's device."""
    tensors = {name: models[name].detach() for name in names}
    first = tensors[names[0]]
    k, size = first.shape[0], sum(tensor[0].numel() for tensor in tensors.values()) if first.shape[0] else 0
    if first.is_meta or not size:
        return first.new_zeros(k, dtype=torch.float64) if not first.is_meta else torch.ones(k, device="meta").double()
    dtype = max((_real(tensor.dtype) for tensor in tensors.values()), key=lambda d: d.itemsize)

    def magnitudes(rows: list[Tensor]) -> Tensor:
        flat = torch.cat([row.abs().to(first.device, dtype) for row in rows], -1)
        return flat if flat.ndim == 2 else flat[None]

    if not any(name in mask for name in names) and k * size <= _BATCH:
        norms, finite = _lowest_norms(magnitudes([tensor.reshape(k, -1) for tensor in tensors.values()]), q)
    else:
        both = []
        for c in range(k):
            rows = [t[c].masked_select(mask[n][c]) if n in mask else t[c].reshape(-1) for n, t in tensors.items()]
            both.append(_lowest_norms(magnitudes(rows), q))
        norms, finite = (torch.cat(parts) for parts in zip(*both))
    if not bool(finite.all()):
        bad = (~finite).nonzero().flatten().tolist()
        raise SurgeryError(f"{', '.join(names)} of models {bad} hold NaN or infinity: leave these models out")
    return norms


def _lowest_norms(magnitudes: Tensor, q: float) -> tuple[Tensor, Tensor]:
    """[R, n] -> the norms of the entries up to the quantile [R], float64, and whether all entries are finite [R].

    `magnitudes` may be reordered.
    """
    n = magnitudes.shape[1]
    if not n:
        return magnitudes.new_zeros(len(magnitudes), dtype=torch.float64), magnitudes.new_ones(1, dtype=torch.bool)
    # A Fraction, because 0.29 * 100 must be 29 and floats make it a little less.
    rank = math.floor(Fraction(repr(float(q))) * (n - 1))
    if magnitudes.device.type == "cpu":
        # NumPy's selection is ten times as fast as kthvalue. NaN and infinity end up at or behind the rank.
        magnitudes.numpy().partition(rank, axis=1)
        edge, rest = magnitudes[:, rank].double(), magnitudes[:, rank:]
        ties = (rest == rest[:, :1]).sum(1)  # equal entries behind the rank count too, and the edge itself
        return (_norm(magnitudes[:, :rank]).square() + ties * edge.square()).sqrt(), rest.isfinite().all(1)
    edge = magnitudes.kthvalue(rank + 1, dim=1, keepdim=True).values
    return _norm(magnitudes.where(magnitudes <= edge, 0)), magnitudes.isfinite().all(1)


def _norm(rows: Tensor) -> Tensor:
    """[R, n] -> [R], summed in float64 without a copy of that size."""
    chunks = [torch.linalg.vector_norm(chunk.double(), dim=1) for chunk in rows.split(_CHUNK, 1)]
    return torch.linalg.vector_norm(torch.stack(chunks), dim=0)


def _real(dtype: torch.dtype) -> torch.dtype:
    """The real dtype that norms of this one are given in."""
    return torch.float64 if compute_dtype(dtype) in (torch.float64, torch.complex128) else torch.float32


def _check_quantile(q: float) -> None:
    if not 0 <= q <= 1:
        raise SurgeryError(f"q is a quantile in [0, 1], got {q}")
