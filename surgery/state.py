"""The algebra of states and stacks.

A *state* maps state-dict names to tensors, parameters and buffers alike, each tensor once: of tied
names only the first is kept. A *stack* is the same with a leading axis K, one entry a model.
No function here changes its input.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor, nn

from surgery.errors import SurgeryError

State: TypeAlias = dict[str, Tensor]
Stack: TypeAlias = dict[str, Tensor]


def state(model: nn.Module) -> State:
    """The state of a model: detached tensors by state-dict name, sharing memory with the model.

    Parameters come before buffers within a module, modules in registration order. A tied tensor
    appears once, under the first of its names; buffers that the state dict leaves out (non-persistent
    ones) are left out here too. `load` is the inverse.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> list(state(net))[:3], state(net)["0.weight"].shape
    (['0.weight', '0.bias', '1.weight'], torch.Size([3, 2]))
    """
    # keep_vars=True gives the Parameter objects themselves, so that tied names can be told by identity.
    seen: set[int] = set()
    result: State = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            result[name] = tensor.detach()
    return result


def load(model: nn.Module, values: Mapping[str, Tensor]) -> nn.Module:
    """Copy a state into `model`, in place, and return the model. Tied tensors are filled through one name.

    Raises SurgeryError if a name is missing or unknown, or a shape differs.

    >>> a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> torch.equal(load(b, state(a)).weight, a.weight)
    True
    """
    own = state(model)
    check_same(own, values, "the model", "the given state")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(values[name])
    return model


def stack(states: Sequence[Mapping[str, Tensor]]) -> Stack:
    """Stack K states of one architecture: tensors of shape S become [K, *S]. `unstack` is the inverse.

    >>> stack([{"w": torch.zeros(2)}, {"w": torch.ones(2)}])["w"]
    tensor([[0., 0.],
            [1., 1.]])
    """
    if not states:
        raise SurgeryError("cannot stack zero states: give at least one")
    for k, other in enumerate(states[1:], 1):
        check_same(states[0], other, "state 0", f"state {k}")
    return {name: torch.stack([s[name] for s in states]) for name in states[0]}


def unstack(models: Mapping[str, Tensor]) -> list[State]:
    """Split a stack into its K states, as views. The inverse of `stack`.

    >>> [s["w"].tolist() for s in unstack({"w": torch.tensor([[0.0], [1.0]])})]
    [[0.0], [1.0]]
    """
    return [{name: tensor[k] for name, tensor in models.items()} for k in range(count(models))]


def broadcast(values: Mapping[str, Tensor], k: int) -> Stack:
    """A stack of k equal entries that takes no memory: each is a view of `values`, to be read, not written.

    >>> broadcast({"w": torch.ones(2)}, 3)["w"].shape
    torch.Size([3, 2])
    """
    return {name: tensor.expand(k, *tensor.shape) for name, tensor in values.items()}


def count(models: Mapping[str, Tensor]) -> int:
    """K, the number of models of a stack; SurgeryError where the tensors disagree.

    >>> count({"w": torch.zeros(5, 2)})
    5
    """
    sizes = {tensor.shape[0] if tensor.ndim else None for tensor in models.values()}
    if len(sizes) != 1 or None in sizes:
        shapes = {name: tuple(tensor.shape) for name, tensor in list(models.items())[:4]}
        raise SurgeryError(f"not a stack: every tensor needs one leading axis K of the same length, got {shapes}")
    return sizes.pop()


def average(
    models: Mapping[str, Tensor],
    weights: Tensor | Sequence[float] | None = None,
    mask: Mapping[str, Tensor] | None = None,
    fallback: Mapping[str, Tensor] | None = None,
) -> State | Stack:
    """The weighted mean over the K models of a stack, element by element. The one aggregation.

    Args:
        models: a stack, tensors [K, *S].
        weights: non-negative, not all zero, need not sum to one. None weighs all alike. Shape [K] gives a
            state; shape [C, K] gives a stack of C means, which is clustering: row c weighs the members of
            cluster c.
        mask: boolean tensors [K, *S] (or a shape that broadcasts to it), True where model k covers the
            element. Names left out are covered entirely. The mean of an element runs over the models
            that cover it. Needs `fallback`.
        fallback: a state (or a stack of C of them) that keeps its value where no model has weight.

    Returns:
        Tensors [*S], or [C, *S] for two-dimensional weights, of the models' dtype. Integer and boolean
        tensors are never averaged: the maximum over the models with weight is carried.

    Raises:
        SurgeryError: for weights of a wrong shape, negative ones, weights that sum to zero and a mask
            without fallback. (Weights that live on an accelerator are not read back, which would stall
            it: a row of zeros without fallback then gives NaN.)

    >>> average({"w": torch.tensor([[0.0], [4.0]])}, weights=[3, 1])
    {'w': tensor([1.])}
    >>> average({"w": torch.tensor([[0.0], [4.0]])}, weights=[[1, 1], [0, 2]])["w"].tolist()
    [[2.0], [4.0]]
    """
    k = count(models)
    weights = _checked_weights(weights, k, fallback is not None)
    moved: dict[torch.device, Tensor] = {}  # one transfer a device, not one a tensor
    if mask is not None and fallback is None:
        raise SurgeryError("a mask can leave elements that nobody covers: give the values to keep as `fallback`")
    if unknown := set(mask or ()) - set(models):
        raise SurgeryError(f"mask has tensors that the stack has not: {sorted(unknown)[:4]}")
    result = {}
    for name, tensor in models.items():
        covered = None if mask is None or name not in mask else mask[name].to(tensor.device).expand_as(tensor)
        keep = None if fallback is None else fallback[name]
        reduce = _mean if tensor.is_floating_point() or tensor.is_complex() else _maximum
        if tensor.device not in moved:
            moved[tensor.device] = weights.to(tensor.device)
        result[name] = reduce(tensor, moved[tensor.device], covered, keep)
    return result


def _checked_weights(weights: Tensor | Sequence[float] | None, k: int, has_fallback: bool) -> Tensor:
    if weights is None:
        return torch.ones(k)
    weights = torch.as_tensor(weights)
    if not weights.is_floating_point():
        weights = weights.double()  # sample counts beyond 2^24 stay exact
    if weights.ndim not in (1, 2) or weights.shape[-1] != k:
        raise SurgeryError(f"weights have shape {tuple(weights.shape)}: expected [{k}] or [C, {k}] for {k} models")
    if weights.device.type == "cpu":
        if not bool((weights >= 0).all() & weights.isfinite().all()):
            raise SurgeryError(f"weights must be finite and not negative, got {weights.tolist()}")
        if not has_fallback and bool((weights.sum(-1) == 0).any()):
            raise SurgeryError("weights sum to zero: give values to keep for that case as `fallback`")
    return weights


def _mean(x: Tensor, weights: Tensor, covered: Tensor | None, keep: Tensor | None) -> Tensor:
    # Half precision accumulates in float32; the [C, K] @ [K, elements] product serves every case.
    compute = x.dtype if x.dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
    values, w = x.reshape(x.shape[0], -1).to(compute), weights.double()
    if covered is None:
        total = w.sum(-1, keepdim=True)
        mean = (w / total).to(compute) @ values
        if keep is not None:
            total = total.expand(mean.shape) > 0
    else:
        inside, w = covered.reshape(values.shape), w.to(compute)
        total = w @ inside.to(compute)
        mean = (w @ values.masked_fill(~inside, 0)) / total
    shape = weights.shape[:-1] + x.shape[1:]
    mean = mean.reshape(shape)
    if keep is not None:
        mean = torch.where((total > 0).reshape(shape), mean, keep.to(mean))
    return mean.to(x.dtype)


def _maximum(x: Tensor, weights: Tensor, covered: Tensor | None, keep: Tensor | None) -> Tensor:
    # bool has no minimum value and amax is the same on uint8 zeros and ones
    values = x.to(torch.uint8) if x.dtype is torch.bool else x
    lowest = torch.iinfo(values.dtype).min
    counts = (weights > 0).reshape(*weights.shape, *[1] * (x.ndim - 1))  # [K, 1...] or [C, K, 1...]
    if covered is not None:
        counts = counts & covered
    axis = weights.ndim - 1
    result = torch.where(counts, values, torch.tensor(lowest, dtype=values.dtype, device=x.device)).amax(axis)
    if keep is not None:
        result = torch.where(counts.any(axis), result, keep.to(result))
    return result.to(x.dtype)


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> Tensor:
    """Euclidean distance between the models of two stacks, over all their floating-point tensors.

    Args:
        a: stack of K models. b: stack of M models of the same architecture.

    Returns:
        [K, M], where entry (k, m) is ||a_k - b_m||.

    >>> distance({"w": torch.zeros(1, 2)}, {"w": torch.tensor([[3.0, 4.0], [0.0, 0.0]])})
    tensor([[5., 0.]])
    """
    # Differences, not the |a|^2 - 2ab + |b|^2 expansion: near neighbours (trained from one start) would cancel.
    return sum(
        torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square() for x, y in _flat_pairs(a, b)
    ).sqrt()


def cosine(a: Mapping[str, Tensor], b: Mapping[str, Tensor] | None = None) -> Tensor:
    """Cosine similarity between the models of two stacks (or of one with itself), over all floating-point tensors.

    Returns:
        [K, M] in [-1, 1]. The similarity with a model that is zero everywhere is 0.

    >>> cosine({"w": torch.tensor([[1.0, 0.0], [1.0, 1.0]])}).round(decimals=3)
    tensor([[1.0000, 0.7070],
            [0.7070, 1.0000]])
    """
    b = a if b is None else b
    pairs = list(_flat_pairs(a, b))
    dot = sum(x @ y.T for x, y in pairs)
    norm_a = sum(x.square().sum(1) for x, _ in pairs).sqrt()
    norm_b = sum(y.square().sum(1) for _, y in pairs).sqrt()
    scale = norm_a[:, None] * norm_b[None, :]
    return torch.where(scale > 0, dot / scale, 0.0).clamp(-1, 1)


def _flat_pairs(a: Mapping[str, Tensor], b: Mapping[str, Tensor]):
    """Pairs ([K, n], [M, n]) of the floating-point tensors of two stacks."""
    k, m = count(a), count(b)
    check_same({n: t[0] for n, t in a.items()}, {n: t[0] for n, t in b.items()}, "the first stack", "the second")
    names = [name for name, tensor in a.items() if tensor.is_floating_point()]
    if not names:
        raise SurgeryError("the stacks hold no floating-point tensor to compare")
    for name in names:
        dtype = torch.promote_types(a[name].dtype, torch.float32)
        yield a[name].reshape(k, -1).to(dtype), b[name].reshape(m, -1).to(dtype)


def check_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor], name_a: str, name_b: str) -> None:
    """Raise SurgeryError unless two states have the same names and shapes; the message shows the first difference.

    >>> check_same({"w": torch.zeros(2)}, {"w": torch.zeros(3)}, "a", "b")
    Traceback (most recent call last):
    surgery.errors.SurgeryError: tensor 'w' has shape (2,) in a and (3,) in b: the architectures differ
    """
    if missing := [name for name in a if name not in b]:
        raise SurgeryError(f"tensor {missing[0]!r} of {name_a} is missing in {name_b} ({len(missing)} missing)")
    if extra := [name for name in b if name not in a]:
        raise SurgeryError(
            f"tensor {extra[0]!r} of {name_b} is unknown to {name_a} ({len(extra)} unknown); "
            "take states with surgery.state(model), which names tied tensors once"
        )
    for name, tensor in a.items():
        if tensor.shape != b[name].shape:
            raise SurgeryError(
                f"tensor {name!r} has shape {tuple(tensor.shape)} in {name_a} and {tuple(b[name].shape)} "
                f"in {name_b}: the architectures differ"
            )
