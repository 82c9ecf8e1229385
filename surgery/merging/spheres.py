"""Means of models by directions and lengths: great circles, task vectors' angles."""

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.lazy import LazyState, Reader
from surgery.merging.driver import (
    Base,
    ByName,
    TensorGroup,
    Weights,
    check_number,
    check_range,
    merge_tensors,
    require_base,
)
from surgery.merging.parts import combination, gram
from surgery.states import Models, State

_SMALL = 1e-6  # radians; along a shorter arc a straight line differs by less than 1e-12
_STEPS, _CLOSE = 200, 1e-12  # of the search for the Karcher mean


def slerp(models: Models, *, t: ByName = 0.5, base: Base | None = None, straight: float = _SMALL) -> State | LazyState:
    """Return the point at t on the arc between two models, tensor by tensor.

    See Shoemake, SIGGRAPH 1985.

    With the angle a between tensors x and y it is (sin((1 - t) a) x + sin(t a) y) / sin a; tensors are not scaled to
    the same length before. Where the angle is below `straight`, or a tensor is zero, it is (1 - t) x + t y.

    Args:
        models: two models.
        t: in [0, 1], or by patterns of tensor names: 0 is the first model, 1 the second, both bit for bit.
        base: if given, the arc is that between the differences from it.
        straight: an angle in radians; mergekit's is the angle whose cosine is 0.9995.

    Raises:
        SurgeryError: if two tensors point in opposite directions, so that no arc between them is the shortest.

    >>> slerp([{"w": torch.tensor([1.0, 0.0])}, {"w": torch.tensor([0.0, 1.0])}])
    {'w': tensor([0.7071, 0.7071])}
    """
    check_range("t", t, 0, 1)
    check_number("straight", straight, 0, 1)
    weights = {name: [1 - at, at] for name, at in t.items()} if isinstance(t, Mapping) else [1 - t, t]
    return merge_tensors(partial(_slerp, straight), models, base=base, weights=weights, method="slerp", exactly=2)


def _slerp(straight: float, group: TensorGroup) -> Reader:
    if len(group.tensors) == 1:  # t is 0 or 1
        return combination(group, [1.0])
    t = group.shares()[1]
    products = gram(group)
    lengths = products.diagonal().sqrt()
    if not bool((lengths > 0).all()):
        return combination(group, [1 - t, t])
    angle = math.acos(max(-1.0, min(1.0, (products[0, 1] / lengths[0] / lengths[1]).item())))
    if angle < max(straight, _SMALL):
        return combination(group, [1 - t, t])
    if math.pi - angle < _SMALL:
        raise SurgeryError(f"{group.name!r} has opposite directions: take linear for it, or t = 0 or 1", code="values")
    return combination(group, [math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)])


def multislerp(models: Models, *, weights: Weights = None, base: Base | None = None) -> State | LazyState:
    """Interpolate between any number of models on the sphere in one step.

    See Goddard, "Multi-SLERP", 2024.

    A tensor has the direction of the weighted mean of the models' directions. Its length is the weighted mean of their
    lengths. (The step in the tangent space that the original adds is zero at that point.) `karcher` takes the mean of
    angles instead.

    Args:
        models: at least one model.
        weights: of the models; not negative, divided by their sum.
        base: if given, directions and lengths belong to the differences from it.

    Raises:
        SurgeryError: if the directions cancel each other.

    >>> multislerp([{"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}])
    {'w': tensor([1.4142, 1.4142])}
    """
    return merge_tensors(partial(_spherical, _step), models, base=base, weights=weights)


def karcher(models: Models, *, weights: Weights = None, base: Base | None = None) -> State | LazyState:
    """Return the Karcher mean on the sphere: the least weighted squared angles.

    Karcher, "Riemannian center of mass and mollifier smoothing" (1977). The mean m solves
    sum w_k log_m(u_k) = 0 for the directions u_k; its length is the weighted mean of lengths. For two models of equal
    lengths and weights it is `slerp` at 0.5. All steps need only the inner products of the models, so that large
    tensors are read twice, however many steps there are.

    Args:
        models: at least one model.
        weights: of the models; not negative, divided by their sum.
        base: if given, directions and lengths belong to the differences from it.

    Raises:
        SurgeryError: if the directions have no unique mean (two opposite ones, say).

    >>> karcher([{"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([0.0, 2.0])}])
    {'w': tensor([1.4142, 1.4142])}
    """
    return merge_tensors(partial(_spherical, _center), models, base=base, weights=weights)


def _spherical(direction, group: TensorGroup) -> Reader:
    """Return the combination in the direction that `direction` chooses."""
    shares = group.shares()
    if len(shares) == 1:
        return combination(group, [1.0])
    products = gram(group)
    lengths = products.diagonal().sqrt()
    weights = torch.tensor(shares, dtype=torch.float64)
    there = (lengths > 0).nonzero().flatten()
    if not len(there):
        return combination(group, [0.0] * len(shares) if group.base else shares)
    cosines = (products / lengths[:, None] / lengths)[there][:, there]
    mean = direction(cosines, weights[there] / weights[there].sum(), group.name)
    length = weights @ lengths
    coefficients = torch.zeros_like(weights)
    coefficients[there] = length * mean / lengths[there]
    return combination(group, coefficients.tolist())


def _step(cosines: Tensor, shares: Tensor, name: str) -> Tensor:
    """Return the weighted mean of unit vectors at length 1, as their coefficients."""
    length = (shares @ cosines @ shares).clamp(min=0).sqrt()
    if length < _SMALL:
        raise SurgeryError(f"directions of {name!r} cancel each other: take other weights, or linear", code="values")
    return shares / length


def _center(cosines: Tensor, shares: Tensor, name: str) -> Tensor:
    """Return the Karcher mean of unit vectors as coefficients, by mean logarithms."""
    mean = _step(cosines, shares, name)
    for _ in range(_STEPS):
        near = (cosines @ mean).clamp(-1, 1)
        angles = near.acos()
        if bool((angles > math.pi - _SMALL).any()):
            break
        pull = shares / torch.sinc(angles / math.pi)  # angle / sin(angle), which is 1 at 0
        step = pull - (pull @ near) * mean  # the mean of logarithms, as coefficients
        length = (step @ cosines @ step).clamp(min=0).sqrt()
        if length < _CLOSE:
            return mean
        mean = length.cos() * mean + length.sin() * step / length
        mean = mean / (mean @ cosines @ mean).clamp(min=1e-300).sqrt()
    else:
        if length < math.sqrt(_CLOSE):  # rounding lets it turn around the mean
            return mean
    raise SurgeryError(f"the directions of {name!r} have no unique mean: take other weights, or linear", code="values")


def model_stock(models: Models, *, base: Base) -> State | LazyState:
    """Return the point between base and mean nearest to the models' centre.

    Jang et al., "Model Stock: all we need is just a few fine-tuned models" (ECCV 2024), equation 5: for each tensor
    t * mean + (1 - t) * base with t = K cos / (1 + (K - 1) cos), where cos is the mean cosine between the task vectors
    of two models. Task vectors that are 0 have the cosine 0. Where the denominator is 0 the base stays.

    Args:
        models: at least two models, fine-tuned from the base.
        base: the model that they were fine-tuned from.

    >>> models = [{"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([1.0, -1.0])}]  # at right angles
    >>> model_stock(models, base={"w": torch.zeros(2)})
    {'w': tensor([0., 0.])}
    """
    return merge_tensors(_stock, models, base=require_base(base), method="model_stock", least=2)


def _stock(group: TensorGroup) -> Reader:
    k = len(group.tensors)
    products = gram(group)
    lengths = products.diagonal().sqrt()
    cosines = (products / (lengths[:, None] * lengths).clamp(min=1e-300)).clamp(-1, 1)
    cosine = (cosines.sum() - cosines.diagonal().sum()).item() / (k * (k - 1))
    below = 1 + (k - 1) * cosine
    share = k * cosine / below if abs(below) > _SMALL else 0.0
    return combination(group, [share / k] * k)
