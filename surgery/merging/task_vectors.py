"""Merge task vectors, the differences of models from their common base.

Most methods make task vectors sparse, each in its own way, and then add or average what is left; a function
`sparse(group, i, **settings)` looks at the whole of task vector i and returns the function that reads a stretch of it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.lazy import LazyState, Reader, spans
from surgery.merging.driver import (
    Base,
    ByName,
    ForEach,
    TensorGroup,
    Weights,
    check_models,
    check_range,
    check_switch,
    group_of,
    merge_tensors,
    require_base,
    rows_of,
)
from surgery.merging.parts import combination, of_rank, uniform
from surgery.states import Models, State, is_pruning_mask


def task_arithmetic(
    models: Models, *, base: Base, weights: Weights = None, scale: ByName = 1.0, normalize: bool = False
) -> State | LazyState:
    """Return the base plus weighted task vectors: base + scale * sum w_k (x_k - base).

    Ilharco et al., "Editing models with task arithmetic" (ICLR 2023), section 2. A negative weight forgets a task.

    Args:
        models: a stack, or a list of states or modules.
        base: the model that they were fine-tuned from.
        weights: of the models, 1 each if not given; one list or lists by patterns of tensor names.
        scale: the paper's lambda, a number or numbers by patterns.
        normalize: whether the sum is divided by the sum of the weights.

    >>> base = {"w": torch.zeros(2)}
    >>> task_arithmetic([{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}], base=base)
    {'w': tensor([1., 2.])}
    """
    return _task_vectors(None, models, base, weights, scale, normalize, elect=False)


def _task_vectors(
    sparse: Callable[..., Reader] | None, models: Models, base: Base, weights: Weights, scale: ByName, normalize: bool,
    *, elect: bool, **settings: tuple[ForEach, float],
) -> State | LazyState:  # fmt: skip
    """Return base + scale * the sum or mean of task vectors.

    `sparse` makes them sparse. Signs are elected if `elect` says so.
    """
    check_switch("normalize", normalize), check_switch("elect", elect)
    settings["scale"] = (check_range("scale", scale, -math.inf, math.inf), 1.0)

    def kernel(group: TensorGroup, *, scale: float, **numbers: float | Sequence[float]) -> Reader:
        weights = group.shares() if normalize or elect else group.weights  # refuses negative weights
        by_model = [{key: of_model(value, k) for key, value in numbers.items()} for k in group.places]
        whole = [sparse is None or values.get("density") == 1 for values in by_model]
        if all(whole) and (not elect or len(weights) == 1):
            return combination(group, [scale * weight for weight in (weights if normalize else group.weights)])
        vectors = [
            partial(group.delta, i) if whole[i] or sparse is None else sparse(group, i, **values)
            for i, values in enumerate(by_model)
        ]

        def read(start: int, stop: int) -> Tensor:
            deltas = [vector(start, stop) for vector in vectors]
            total = elect_sign(deltas, group.weights, normalize) if elect else _add(deltas, weights)
            return total.mul_(scale).add_(group.origin(start, stop))

        return read

    return merge_tensors(kernel, models, base=require_base(base), weights=weights, settings=settings)


def of_model(value: float | Sequence[float], k: int) -> float:
    """Return what a setting of a tensor is for model k."""
    return value[k] if isinstance(value, list | tuple) else value  # type: ignore[return-value]


def _add(deltas: list[Tensor], weights: list[float]) -> Tensor:
    total = torch.zeros_like(deltas[0])
    for delta, weight in zip(deltas, weights):
        total.add_(delta, alpha=weight)
    return total


def elect_sign(deltas: list[Tensor], weights: list[float], normalize: bool) -> Tensor:
    """Return the weighted sum, or mean, over values with the sign of the sum of all.

    These are lines 9 to 16 of TIES.

    >>> elect_sign([torch.tensor([3.0, 0.0]), torch.tensor([-1.0, 2.0])], [1.0, 1.0], True)
    tensor([3., 2.])
    """
    sign = _add(deltas, weights).sign_()
    total, share = torch.zeros_like(sign), torch.zeros_like(sign)
    for delta, weight in zip(deltas, weights):
        agrees = (delta * sign) > 0
        total.add_(delta * agrees, alpha=weight)
        share.add_(agrees, alpha=weight)
    return total.div_(share.masked_fill_(share == 0, 1)) if normalize else total


def magnitudes(group: TensorGroup, i: int) -> Iterator[Tensor]:
    """Yield slabs of |x_i - base|."""
    for start, stop in spans(group.size):
        yield group.delta(i, start, stop).abs_()


def ties(
    models: Models,
    *,
    base: Base,
    weights: Weights = None,
    density: ForEach = 0.2,
    scale: ByName = 1.0,
    normalize: bool = True,
    across: Literal["tensor", "model"] = "tensor",
) -> State | LazyState:
    """Trim, elect signs and merge task vectors (TIES).

    See Yadav et al., "TIES-Merging", NeurIPS 2023, algorithm 1.

    Of each task vector the share `density` of largest magnitudes is kept. Each element has the sign of the weighted
    sum over models. The models that have that sign there are averaged, and the mean times `scale` is added to the base.
    Where the sum is 0 no sign is elected, and the base stays. Of equal magnitudes at the limit all are kept.

    Args:
        models, base, weights, scale: as for `task_arithmetic`; weights must not be negative.
        density: in (0, 1], a list with one for each model, or either by patterns of tensor names (1 where none
            matches).
        normalize: whether agreeing task vectors are averaged; otherwise they are added.
        across: whether magnitudes are compared within each tensor (as in mergekit), or over the whole model (as in the
            paper; `density` is then one number).

    >>> models = [{"w": torch.tensor([4.0, 1.0, 0.1])}, {"w": torch.tensor([2.0, -3.0, 0.1])}]
    >>> ties(models, base={"w": torch.zeros(3)}, density=0.67)
    {'w': tensor([ 3., -3.,  0.])}
    """
    check_range("density", density, 0, 1, open_low=True, per_model=True)
    if across == "tensor":
        return _task_vectors(_largest, models, base, weights, scale, normalize, elect=True, density=(density, 1.0))
    if across != "model" or not isinstance(density, int | float):
        raise SurgeryError(f"{across=} with {density=}: give across='tensor', or 'model' and a number", code="argument")
    limits = _limits(models, base, weights, density)
    return _task_vectors(
        lambda group, i: _above(limits[group.places[i]], group, i), models, base, weights, scale, normalize, elect=True
    )


def _largest(group: TensorGroup, i: int, density: float) -> Reader:
    count = max(1, int(density * group.size))
    return _above(of_rank(lambda: magnitudes(group, i), group.size, group.size - count) if group.size else 0, group, i)


def _above(limit: Tensor | float, group: TensorGroup, i: int) -> Reader:
    def read(start: int, stop: int) -> Tensor:
        delta = group.delta(i, start, stop)
        return delta.mul_(delta.abs() >= limit)

    return read


def _limits(models: Models, base: Base, weights: Weights, density: float) -> dict[int, Tensor | float]:
    """Return the smallest magnitude kept of each counted model's whole task vector."""
    states, base = check_models(models, require_base(base))
    rows = rows_of(weights, len(states), states[0])
    result: dict[int, Tensor | float] = {}
    for k in range(len(states)):
        if not isinstance(rows, dict) and not rows[k]:
            continue
        alone = [float(j == k) for j in range(len(states))]
        names = [name for name in states[0] if not is_pruning_mask(name, states[0])]
        groups = [group_of(name, states, base, alone) for name in names]
        groups = [group for group in groups if group.tensors[0].dtype.is_floating_point]
        size = sum(group.size for group in groups)
        slabs = lambda g=groups: (slab.double() for group in g for slab in magnitudes(group, 0))  # noqa: E731
        result[k] = of_rank(slabs, size, size - max(1, int(density * size))) if size else 0
    return result


def dare(
    models: Models,
    *,
    base: Base,
    weights: Weights = None,
    density: ForEach = 0.5,
    scale: ByName = 1.0,
    rescale: bool = True,
    elect: bool = False,
    normalize: bool = False,
    seed: int = 0,
) -> State | LazyState:
    """Drop elements of task vectors at random and rescale the others.

    Yu et al., "Language models are Super Mario" (ICML 2024), equations 1 and 2.

    Args:
        models, base, weights, scale, normalize: as for `task_arithmetic`.
        density: the probability that an element stays, in (0, 1]; 1 - p of the paper.
        rescale: whether elements that stay are divided by `density`, which keeps their expectation.
        elect: whether signs are elected, as `ties` does after trimming (DARE-TIES).
        seed: of the random numbers; which elements stay is a function of seed, tensor name, model and element.

    >>> models, base = [{"w": torch.ones(64)}, {"w": torch.ones(64)}], {"w": torch.zeros(64)}
    >>> sorted(set(dare(models, base=base, weights=[1, 0])["w"].tolist()))
    [0.0, 2.0]
    """
    check_range("density", density, 0, 1, open_low=True, per_model=True)
    sparse = partial(_drop, seed=_seed(seed), rescale=check_switch("rescale", rescale))
    return _task_vectors(sparse, models, base, weights, scale, normalize, elect=elect, density=(density, 1.0))


def _drop(group: TensorGroup, i: int, density: float, *, seed: int, rescale: bool) -> Reader:
    def read(start: int, stop: int) -> Tensor:
        delta = group.delta(i, start, stop)
        stays = uniform(seed, group.name, group.places[i], start, stop).to(delta.device) < density
        return delta.mul_(stays).div_(density if rescale else 1)

    return read


def _seed(seed: int) -> int:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise SurgeryError(f"seed={seed!r}: give a whole number", code="argument")
    return seed


def breadcrumbs(
    models: Models,
    *,
    base: Base,
    weights: Weights = None,
    density: ForEach = 0.9,
    gamma: ForEach = 0.01,
    scale: ByName = 1.0,
    elect: bool = False,
    normalize: bool = False,
) -> State | LazyState:
    """Leave the largest and smallest magnitudes of task vectors out.

    Davari and Belilovsky, "Model Breadcrumbs" (ECCV 2024), equation 2.

    Args:
        models, base, weights, scale, normalize: as for `task_arithmetic`.
        density: the share of each tensor that is kept, in (0, 1].
        gamma: the share of largest magnitudes that is left out, in [0, 1); the rest of 1 - density is left out among
            the smallest. Where density + gamma is above 1, fewer of the largest are left out.
        elect: whether signs are elected as `ties` does.

    >>> breadcrumbs([{"w": torch.tensor([9.0, 1.0, 2.0, 3.0])}], base={"w": torch.zeros(4)}, density=0.5, gamma=0.25)
    {'w': tensor([0., 0., 2., 3.])}
    """
    check_range("density", density, 0, 1, open_low=True, per_model=True)
    settings = {"density": (density, 1.0), "gamma": (check_range("gamma", gamma, 0, 1, per_model=True), 0.0)}
    return _task_vectors(_middle, models, base, weights, scale, normalize, elect=elect, **settings)


def _middle(group: TensorGroup, i: int, density: float, gamma: float) -> Reader:
    count = int(density * group.size)
    if not count:
        return lambda start, stop: torch.zeros_like(group.delta(i, start, stop))
    below = max(0, group.size - count - int(gamma * group.size))
    low = of_rank(lambda: magnitudes(group, i), group.size, below)
    high = of_rank(lambda: magnitudes(group, i), group.size, below + count - 1)

    def read(start: int, stop: int) -> Tensor:
        delta = group.delta(i, start, stop)
        size = delta.abs()
        return delta.mul_((size >= low) & (size <= high))

    return read


def della(
    models: Models,
    *,
    base: Base,
    weights: Weights = None,
    density: ForEach = 0.5,
    epsilon: ForEach = 0.1,
    scale: ByName = 1.0,
    elect: bool = True,
    normalize: bool | None = None,
    seed: int = 0,
) -> State | LazyState:
    """Drop mostly small elements of task vectors, rescale, elect signs and average.

    Deep et al., "DELLA-Merging" (2024), section 3.

    In each row of n elements (what belongs to one output; a bias is one row) the element of rank r, from 0 for the
    largest magnitude, is dropped with the probability p = 1 - density - epsilon / 2 + epsilon * r / n, and divided by
    1 - p if it stays.

    Args:
        models, base, weights, scale: as for `task_arithmetic`.
        density: the mean probability that an element stays, in (0, 1]; 1 drops nothing.
        epsilon: the width of the range of probabilities, which must lie within [0, 1]. (mergekit's epsilon is half of
            it.)
        elect: whether signs are elected as `ties` does; without it this is mergekit's `della_linear`.
        normalize: whether what agrees is averaged, or without `elect` the sum divided by the sum of the weights; the
            same as `elect` if not given.
        seed: of the random numbers, as for `dare`.

    >>> della([{"w": torch.ones(2, 3)}], base={"w": torch.zeros(2, 3)}, density=1.0)["w"].sum()
    tensor(6.)
    """
    check_range("density", density, 0, 1, open_low=True, per_model=True)
    settings = {"density": (density, 1.0), "epsilon": (check_range("epsilon", epsilon, 0, 1, per_model=True), 0.0)}
    sparse = partial(_by_rank, seed=_seed(seed))
    normalize = elect if normalize is None else normalize
    return _task_vectors(sparse, models, base, weights, scale, normalize, elect=elect, **settings)


def _by_rank(group: TensorGroup, i: int, density: float, epsilon: float, *, seed: int) -> Reader:
    shape = group.tensors[i].shape
    n = group.size // shape[0] if len(shape) > 1 and shape[0] else max(group.size, 1)
    lowest = 1 - density - epsilon / 2
    if lowest < 0 or density - epsilon / 2 < 0:
        raise SurgeryError(
            f"density={density:g} of {group.name!r} takes an epsilon up to {2 * min(density, 1 - density):g}",
            code="argument",
        )

    def rows(start: int, stop: int) -> Tensor:
        delta = group.delta(i, start, stop)
        order = delta.abs().view(-1, n).argsort(dim=1, descending=True, stable=True)
        ranks = torch.empty_like(order).scatter_(1, order, torch.arange(n, device=order.device).expand_as(order))
        drop = (lowest + epsilon / n * ranks.to(delta.dtype)).view(-1)
        stays = uniform(seed, group.name, group.places[i], start, stop).to(delta.device) >= drop
        return torch.where(stays, delta / (1 - drop), torch.zeros_like(delta))

    def read(start: int, stop: int) -> Tensor:
        first = start // n * n  # ranks need whole rows
        return rows(first, -(-stop // n) * n)[start - first : stop - first]

    return read


def sce(models: Models, *, base: Base, select: ByName = 1.0) -> State | LazyState:
    """Weight task vectors by their energy where models differ most.

    See Wan et al., "FuseChat", 2024, section 3.3.

    Select: of each tensor the share `select` of the elements with the largest variance over the models, counted among
    those whose variance is not 0. Calculate: model k's weight is the mean of its squared selected elements, divided by
    the sum over models. Erase: elements with another sign than the sum over models are left out, and the weights of
    the others are divided by their sum.

    Args:
        models: a stack, or a list of states or modules.
        base: the model that they were fine-tuned from.
        select: in (0, 1], or by patterns of tensor names (1 where none matches). 1 keeps all elements.

    >>> sce([{"w": torch.tensor([2.0, 1.0])}, {"w": torch.tensor([-1.0, 1.0])}], base={"w": torch.zeros(2)})
    {'w': tensor([2., 1.])}
    """
    settings = {"select": (check_range("select", select, 0, 1, open_low=True), 1.0)}
    return merge_tensors(_sce, models, base=require_base(base), settings=settings)


def _sce(group: TensorGroup, select: float) -> Reader:
    k = len(group.tensors)

    def deltas(start: int, stop: int) -> Tensor:
        return torch.stack([group.delta(i, start, stop) for i in range(k)])

    def variances() -> Iterator[Tensor]:
        for start, stop in spans(group.size):
            yield deltas(start, stop).var(0, correction=0)

    limit = torch.zeros(())
    if select < 1:
        differ = sum(int(slab.count_nonzero()) for slab in variances())
        count = int(select * differ)
        if not count:
            return lambda start, stop: group.origin(start, stop)
        limit = of_rank(variances, group.size, group.size - count)

    def selected(start: int, stop: int) -> Tensor:
        values = deltas(start, stop)
        return values if select == 1 else values * (values.var(0, correction=0) >= limit)

    energy = sum(selected(start, stop).double().square().sum(1) for start, stop in spans(group.size))
    shares = (energy / energy.sum()).tolist() if group.size and bool(energy.sum() > 0) else [1 / k] * k

    def read(start: int, stop: int) -> Tensor:
        values = selected(start, stop)
        agrees = values * values.sum(0).sign() > 0
        weights = torch.tensor(shares, dtype=values.dtype, device=values.device)[:, None] * agrees
        total = weights.sum(0)
        return ((values * weights).sum(0) / total.masked_fill(total == 0, 1)).add_(group.origin(start, stop))

    return read


def nearswap(models: Models, *, base: Base, t: ByName) -> State | LazyState:
    """Return the base moved towards another model by at most t in each element.

    This is alchemonaut's NearSwap, which mergekit has, too.

    Elements that are within t of the other model's take its value; the rest change by t: base + clamp(x - base, -t, t).

    Args:
        models: one model.
        base: the model that is changed.
        t: a distance, not negative, or distances by patterns of tensor names (0 where none matches).

    >>> nearswap([{"w": torch.tensor([0.1, 9.0, -9.0])}], base={"w": torch.zeros(3)}, t=0.5)
    {'w': tensor([ 0.1000,  0.5000, -0.5000])}
    """

    def kernel(group: TensorGroup, t: float) -> Reader:
        def read(start: int, stop: int) -> Tensor:
            other, origin = group.value(0, start, stop), group.origin(start, stop)
            difference = other - origin
            return torch.where(difference.abs() <= t, other, origin + difference.clamp(-t, t))

        return read

    settings = {"t": (check_range("t", t, 0, math.inf), 0.0)}
    return merge_tensors(kernel, models, base=require_base(base), method="nearswap", exactly=1, settings=settings)
