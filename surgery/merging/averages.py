"""Means of models, weighted by numbers, a score, or measurements of each model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.lazy import LazyState, Pieces, Reader, pieces_of
from surgery.merging.driver import (
    ByName,
    Kernel,
    TensorGroup,
    Weights,
    check_models,
    check_range,
    check_switch,
    merge_tensors,
)
from surgery.merging.parts import combination
from surgery.states import Models, State, stack_size


def linear(models: Models, *, weights: Weights = None, normalize: bool = True) -> State | LazyState:
    """Return the weighted mean of models, sum w_k x_k / sum w_k.

    With equal weights it is the uniform soup.

    See Wortsman et al., "Model soups", ICML 2022.

    Args:
        models: a stack, or a list of states or modules.
        weights: of the models, one list or lists by patterns of tensor names; not negative if they are normalised.
        normalize: whether weights are divided by their sum.

    Raises:
        SurgeryError: for models whose names, shapes or devices differ, and for weights that do not fit.

    >>> linear([{"w": torch.tensor([0.0])}, {"w": torch.tensor([4.0])}], weights=[3, 1])
    {'w': tensor([1.])}
    """
    for value in normalize.values() if isinstance(normalize, Mapping) else [normalize]:
        check_switch("normalize", value)

    def mean(group: TensorGroup, normalize: bool) -> Reader:
        return combination(group, group.shares() if normalize else group.weights)

    return merge_tensors(mean, models, weights=weights, settings={"normalize": (normalize, True)})


class Soup(NamedTuple):
    """A greedy soup of models.

    Attributes:
        state: the mean of the models that were taken.
        taken: their places in the list, in the order in which they were added.
        score: the mean's score.
        scores: of every model alone.
    """

    state: State | LazyState
    taken: list[int]
    score: float
    scores: list[float]


def greedy_soup(models: Models, *, score: Callable[[Any], float]) -> Soup:
    """Return the mean of models that do not lower a score: the greedy soup.

    See Wortsman et al., "Model soups", ICML 2022, recipe 1.

    Models are tried from the best to the worst; one stays if the mean with it scores at least as much as without.

    Args:
        models: a stack, or a list of states or modules.
        score: of a state, larger is better: accuracy on held-out data, say. It must not be NaN.

    >>> models = [{"w": torch.tensor(w)} for w in (0.0, 3.0, 9.0)]
    >>> greedy_soup(models, score=lambda state: -abs(state["w"].item() - 2))[1:]
    ([1, 0], -0.5, [-2.0, -1.0, -7.0])
    """
    states, _ = check_models(models)

    def scored(state: Any) -> float:
        value = score(state)
        try:
            value = float(value)
        except (TypeError, ValueError):
            raise SurgeryError(f"score(state) gives {type(value).__name__}, no number", code="argument") from None
        if value != value:
            raise SurgeryError("the score of a model is NaN, so that models cannot be compared by it", code="values")
        return value

    scores = [scored(state) for state in states]
    order = sorted(range(len(states)), key=lambda k: -scores[k])
    taken, best = order[:1], scores[order[0]]
    soup = linear([states[order[0]]])
    for k in order[1:]:
        with_it = linear([states[j] for j in (*taken, k)])
        if (value := scored(with_it)) >= best:
            taken, best, soup = [*taken, k], value, with_it
    return Soup(soup, taken, best, scores)


def fisher(models: Models, *, fishers: Sequence[Mapping[str, Tensor]], weights: Weights = None) -> State | LazyState:
    """Return the mean weighted by Fisher information: sum w_k F_k x_k / sum w_k F_k.

    Matena and Raffel, "Merging models with Fisher-weighted averaging" (NeurIPS 2022), equation 4.

    Args:
        models: a stack, or a list of states or modules.
        fishers: for each model its Fisher information by tensor name, not negative, of the tensors' shapes;
            `fisher_information` computes it. Tensors that none of them names (buffers) have the weighted mean.
        weights: of the models, the paper's lambda.

    Raises:
        SurgeryError: for information of other shapes, negative, NaN or infinite, or of some models only.

    >>> models = [{"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([5.0, 5.0])}]
    >>> fisher(models, fishers=[{"w": torch.tensor([3.0, 0.0])}, {"w": torch.tensor([1.0, 0.0])}])
    {'w': tensor([2., 3.])}
    """
    return _by_measures(_fisher, models, fishers, "fishers", "Fisher information", weights)


def _fisher(group: TensorGroup, information: list[Pieces]) -> Reader:
    shares, shape = group.shares(), group.tensors[0].shape
    for k, entry in zip(group.places, information):
        if entry.shape != shape:
            raise SurgeryError(
                f"the Fisher information of {group.name!r} is {entry.shape} in model {k}: need {shape}", code="mismatch"
            )

    def read(start: int, stop: int) -> Tensor:
        weighted_sum: Any = 0
        weight_sum: Any = 0
        plain_mean: Any = 0
        for i, (share, known) in enumerate(zip(shares, information)):
            value = group.value(i, start, stop)
            weight = share * known.read(start, stop).to(value)
            if not bool((weight >= 0).all() & weight.isfinite().all()):
                raise SurgeryError(
                    f"Fisher information of {group.name!r} is negative or not finite in model {group.places[i]}",
                    code="values",
                )
            weighted_sum, weight_sum, plain_mean = (
                weighted_sum + weight * value,
                weight_sum + weight,
                plain_mean + share * value,
            )
        return torch.where(weight_sum > 0, weighted_sum / weight_sum.masked_fill(weight_sum == 0, 1), plain_mean)

    return read


def regmean(
    models: Models, *, grams: Sequence[Mapping[str, Tensor]], weights: Weights = None, alpha: ByName = 0.9
) -> State | LazyState:
    """Return least-squares weights of linear layers, and means of all other tensors.

    Jin et al., "Dataless knowledge fusion by merging weights of language models" (ICLR 2023), equation 2:
    W = (sum G_k)^-1 sum G_k W_k with the inner products G_k = X_k^T X_k of a layer's inputs, whose elements off the
    diagonal are multiplied by `alpha`. An input that is 0 in all models has the weighted mean of the models.

    Args:
        models: a stack, or a list of states or modules.
        grams: for each model the inner products [I, I] by the name of the layer's weight [O, I] (or [O, c, h, w] with
            c * h * w = I); `input_grams` computes them.
        weights: of the models; they multiply the inner products.
        alpha: in [0, 1], or by patterns of tensor names; below 1 the sum can be inverted.

    Raises:
        SurgeryError: for inner products that do not fit, hold NaN or infinity, or whose sum cannot be inverted.

    >>> models = [{"w": torch.tensor([[1.0, 1.0]])}, {"w": torch.tensor([[5.0, 5.0]])}]
    >>> grams = [{"w": torch.tensor([3.0, 0.0]).diag()}, {"w": torch.tensor([1.0, 0.0]).diag()}]
    >>> regmean(models, grams=grams)
    {'w': tensor([[2., 3.]])}
    """
    settings = {"alpha": (check_range("alpha", alpha, 0, 1), 0.9)}
    return _by_measures(_regmean, models, grams, "grams", "inner products of inputs", weights, settings)


def _regmean(group: TensorGroup, grams: list[Pieces], alpha: float) -> Reader:
    out = group.tensors[0].shape[0]
    inputs = group.size // out if out else 0
    products = [gram.whole() for gram in grams]
    for k, product in zip(group.places, products):
        if tuple(product.shape) != (inputs, inputs):
            raise SurgeryError(
                f"inner products for {group.name!r} are {tuple(product.shape)} in model {k}: need {(inputs, inputs)}",
                code="mismatch",
            )
        if not bool(product.isfinite().all()):
            raise SurgeryError(f"inner products for {group.name!r} hold NaN or infinity in model {k}", code="values")
    left = torch.zeros(inputs, inputs, dtype=torch.float64)
    right = torch.zeros(inputs, out, dtype=torch.float64)
    dead = sum(product.diagonal().abs() for product in products) == 0
    for i, (share, product) in enumerate(zip(group.shares(), products)):
        product = product.cpu().double()
        product = share * (alpha * product + (1 - alpha) * product.diagonal().diag() + dead.cpu().double().diag())
        left += product
        right += product @ group.value(i, 0, group.size).cpu().double().view(out, inputs).T
    try:
        solved = torch.linalg.solve(left, right).T
    except RuntimeError:  # torch.linalg.LinAlgError is one
        raise SurgeryError(
            f"the inner products for {group.name!r} have no inverse: give alpha below 1, or more inputs", code="values"
        ) from None
    flat = solved.reshape(-1).to(group.dtype).to(group.tensors[0].device)
    return lambda start, stop: flat[start:stop]


def _by_measures(
    kernel: Kernel,
    models: Models,
    measures: Sequence[Mapping[str, Tensor]],
    argument: str,
    label: str,
    weights: Weights,
    settings: Mapping[str, tuple[Any, Any]] | None = None,
) -> State | LazyState:
    """Merge measured tensors by `kernel(group, measures, ...)`, others by the mean."""
    if not isinstance(measures, list | tuple) or not all(isinstance(values, Mapping) for values in measures):
        raise SurgeryError(f"{argument} is a list with the {label} of each model, tensors by name", code="argument")
    names = {name for values in measures for name in values}
    for name in names:
        if lacking := [k for k, values in enumerate(measures) if name not in values]:
            raise SurgeryError(
                f"model {lacking[0]} has no {label} of {name!r}, which others have: compute it", code="mismatch"
            )

    measured = {name: name for name in names} | _find_tied(models, names)

    def mean(group: TensorGroup, **numbers: Any) -> Reader:
        if group.places[-1] >= len(measures):
            raise SurgeryError(f"{len(measures)} models have {label}, not model {group.places[-1]}", code="argument")
        shares = group.shares()
        if group.name not in measured or len(shares) == 1:
            return combination(group, shares)
        return kernel(group, [pieces_of(measures[k], measured[group.name]) for k in group.places], **numbers)

    result = merge_tensors(mean, models, weights=weights, settings=settings)
    count = stack_size(models) if isinstance(models, Mapping) else len(models)
    if len(measures) > count:
        raise SurgeryError(f"{len(measures)} models have {label}, {count} are merged: give one each", code="argument")
    if unknown := names - set(result):
        raise SurgeryError(f"{argument} name {min(unknown)!r}, but the models have no such tensor", code="name")
    return result


def _find_tied(models: Models, names: Collection[str]) -> dict[str, str]:
    """Return for other names of measured tensors, as a `state_dict` has them, the measured name.

    Both lie in the same memory, in every model that has them.
    """
    several = () if isinstance(models, Mapping) else models
    states = [model for model in several if isinstance(model, Mapping) and not isinstance(model, LazyState)]
    found: dict[str, set[str | None]] = {}
    for values in states:
        held = {name: value for name, value in values.items() if isinstance(value, Tensor) and value.numel()}
        places = {_place_of(value): name for name, value in held.items() if name in names}
        for name, value in held.items():
            if name not in names:
                found.setdefault(name, set()).add(places.get(_place_of(value)))
    return {name: first for name, every in found.items() if len(every) == 1 and (first := next(iter(every)))}


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    """Return where a tensor lies in memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
