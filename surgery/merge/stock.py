"""Model stock: how far from the base the centre of fine-tuned models lies."""

from collections.abc import Mapping

from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.lazy import LazyState, Reader
from surgery.merge.combine import combination, gram
from surgery.merge.group import Group, merged
from surgery.states import Models, State

_SINGULAR = 1e-6


def model_stock(models: Models, *, base: Mapping[str, Tensor] | nn.Module) -> State | LazyState:
    """The point between the base and the mean of models that is nearest to the centre of the weights' distribution.

    Jang et al., "Model Stock: all we need is just a few fine-tuned models" (ECCV 2024), equation 5: for each tensor
    t * mean + (1 - t) * base with t = K cos / (1 + (K - 1) cos), where cos is the mean cosine between the task vectors
    of two models. Task vectors that are 0 have the cosine 0. Where the denominator is 0 the base stays.

    Args:
        models: at least two models, fine-tuned from the base.
        base: the model that they were fine-tuned from.

    >>> import torch
    >>> models = [{"w": torch.tensor([1.0, 1.0])}, {"w": torch.tensor([1.0, -1.0])}]  # at right angles
    >>> model_stock(models, base={"w": torch.zeros(2)})
    {'w': tensor([0., 0.])}
    """
    if base is None:
        raise SurgeryError("model_stock moves from a base: give the model that was fine-tuned as base=...")
    return merged(_stock, models, base=base, least=2)


def _stock(group: Group) -> Reader:
    k = len(group.tensors)
    products = gram(group)
    lengths = products.diagonal().sqrt()
    cosines = (products / (lengths[:, None] * lengths).clamp(min=1e-300)).clamp(-1, 1)
    cosine = (cosines.sum() - cosines.diagonal().sum()).item() / (k * (k - 1))
    below = 1 + (k - 1) * cosine
    share = k * cosine / below if abs(below) > _SINGULAR else 0.0
    return combination(group, [share / k] * k)
