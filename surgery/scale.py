"""Scale models of different architectures, tensor by tensor, to the same norm before they are averaged.

FedFA (Flexible Architectures, ECML-PKDD 2024; two other methods share the name), Algorithm 1, lines 12-22. Small models
have larger weights than large ones and would dominate the mean.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from surgery.averaging import checked_mask
from surgery.decomposition import checked_segments
from surgery.errors import SurgeryError
from surgery.percentile import check_quantile, joint_norms, norm_dtype
from surgery.states import Models, Stack, as_stack, stack_size
from surgery.transfer import upload

_NOTHING = 1e-6  # times the largest norm; a bias that has hardly left 0 may have less


def percentile_norm(tensor: Tensor, *, q: float = 0.95, stacked: bool = False) -> Tensor:
    """The L2 norm of the entries whose magnitude is at most the q-quantile of the magnitudes (W95 of the paper).

    The quantile is the linearly interpolated one, at position q (n - 1) of the n sorted magnitudes. It is at least the
    entry below that position and less than the next one, so that entry is used as an exact threshold, for any n and
    without rounding. (The paper does not say whether it ranks signed or absolute values; here they are absolute.)

    Args:
        tensor: floating or complex, of any shape. An empty tensor has norm 0.
        q: in [0, 1]; 1 gives the norm of the whole tensor.
        stacked: the tensor is [K, *S], and the K entries have norms of their own.

    Returns:
        A scalar, or [K]; at least float32, summed in float64. On the meta device it has no data.

    Raises:
        SurgeryError: for q out of range, integers, and tensors that hold NaN or infinity.

    >>> percentile_norm(torch.tensor([3.0, -4.0, 100.0]), q=0.5)
    tensor(5.)
    >>> percentile_norm(torch.tensor([[3.0, -4.0], [0.0, 2.0]]), q=1.0, stacked=True)
    tensor([5., 2.])
    """
    check_quantile(q)
    if not isinstance(tensor, Tensor):
        raise SurgeryError(f"a {type(tensor).__name__} has no percentile norm: give one tensor")
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise SurgeryError(f"a tensor of {tensor.dtype} has no percentile norm: convert it to float first")
    if stacked and not tensor.ndim:
        raise SurgeryError("a scalar is not a stack: give a tensor [K, *S] or stacked=False")
    norms = joint_norms([[row] for row in (tensor if stacked else tensor[None])], q)[:, 0]
    if bool(norms.isnan().any()):
        bad = f" of models {norms.isnan().nonzero().flatten().tolist()}" if stacked else ""
        raise SurgeryError(f"the tensor{bad} holds NaN or infinity: leave it out")
    norms = norms.to(tensor.device, norm_dtype(tensor.dtype))
    return norms if stacked else norms[0]


def match_norms(
    models: Models,
    *,
    mask: Mapping[str, Tensor] | Sequence[Mapping[str, Tensor]] | None = None,
    q: float = 0.95,
    groups: Sequence[Sequence[str]] | None = None,
) -> tuple[Stack, dict[str, Tensor]]:
    """Scale the models of a stack, tensor by tensor, to the mean of their percentile norms.

    Model c is multiplied by alpha_c = mean_k ||Wq_k|| / ||Wq_c|| (Alg. 1, line 18), where Wq holds the entries that
    `percentile_norm` counts. Averaging the result with weights n_c and a mask is the scalable aggregation of lines
    19-22.

    Args:
        models: a stack, tensors [K, *S], or a list of K states or modules.
        mask: boolean tensors as `average` takes them. A model's norm is that of the elements that it covers; all of its
            elements are scaled. Tensors without a mask are covered entirely.
        q: the quantile, in [0, 1].
        groups: names of tensors that have one norm and one factor together, as `segments(layers(model))` gives them.
            Tensors in no group are not scaled, so `[(n,) for n in parameters]` leaves norm statistics as they are. By
            default each floating tensor is a group.

    Returns:
        The scaled stack, which shares no memory with the input, and by name of each scaled tensor its factors [K] (at
        least float32). Integer and boolean tensors are copied. A model whose norm is 0 (it covers nothing of the group,
        or only zeros) or below a millionth of the largest gets factor 1 and is not counted in the mean; the paper would
        divide by it.

    Raises:
        SurgeryError: for q out of range, groups that name a tensor twice or an unknown one, masks that do not fit, and
            covered elements that are NaN or infinite.

    >>> scaled, factors = match_norms({"w": torch.tensor([[3.0, 4.0], [6.0, 8.0]])}, q=1.0)
    >>> factors["w"], scaled["w"].norm(dim=1)
    (tensor([1.5000, 0.7500]), tensor([7.5000, 7.5000]))
    """
    models = as_stack(models)
    k = stack_size(models)
    check_quantile(q)
    mask = {} if mask is None else {name: checked_mask(name, m, models) for name, m in as_stack(mask).items()}
    result, factors = {}, {}
    floating = {name for name, tensor in models.items() if tensor.is_floating_point() or tensor.is_complex()}
    for group in checked_groups(groups, models, floating, "the stack"):
        jobs = [
            [models[n][c].masked_select(mask[n][c]) if n in mask else models[n][c] for n in group] for c in range(k)
        ]
        norms = joint_norms(jobs, q)[:, 0]
        if bool(norms.isnan().any()):
            bad = norms.isnan().nonzero().flatten().tolist()
            raise SurgeryError(f"{', '.join(group)} of models {bad} hold NaN or infinity: leave these models out")
        alpha = matching_factors(norms[None])[0]
        for name in group:
            tensor = models[name]
            factors[name] = upload(alpha.to(norm_dtype(tensor.dtype)), tensor.device)
            shape = (k, *[1] * (tensor.ndim - 1))
            result[name] = (tensor.detach() * factors[name].view(shape)).to(tensor.dtype)
    # In the order of the stack. Tensors in no group are copied, so that no memory is shared.
    return {n: result[n] if n in result else tensor.clone() for n, tensor in models.items()}, factors


def matching_factors(norms: Tensor) -> Tensor:
    """Norms [G, K] of K models -> factors [G, K]: the mean norm of the group over the model's own; 1 for tiny norms."""
    counted = norms > _NOTHING * norms.amax(1, keepdim=True)
    mean = torch.where(counted, norms, 0).sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)
    return torch.where(counted, mean / norms, 1)


def checked_groups(
    groups: Sequence[Sequence[str]] | None, names: Collection[str], floating: Collection[str], whole: str
) -> list[tuple[str, ...]]:
    """The groups without integer tensors and without empty groups; SurgeryError for unknown or repeated names."""
    groups = [(name,) for name in names] if groups is None else checked_segments(groups, "groups")
    seen: set[str] = set()
    for name in (name for group in groups for name in group):
        if name not in names:
            raise SurgeryError(f"groups name {name!r}, but {whole} has no such tensor")
        if name in seen:
            raise SurgeryError(f"tensor {name!r} is in two groups: it can have only one factor")
        seen.add(name)
    within = [tuple(name for name in group if name in floating) for group in groups]
    return [group for group in within if group]
