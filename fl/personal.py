"""What methods with a model for each client have in common: reading the participants' models and putting them back."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fl.federation import Federation
from surgery import Stack, layers


def take(models: Stack, rows: Sequence[int]) -> Stack:
    """The models of some rows of a stack, in that order.

    >>> take({"w": torch.tensor([[0.0], [1.0], [2.0]])}, [2, 0])["w"].flatten()
    tensor([2., 0.])
    """
    return {name: tensor[_index(rows, tensor)] for name, tensor in models.items()}


def put(models: Stack, rows: Sequence[int], new: Stack) -> Stack:
    """The stack with its rows replaced; the given one is unchanged.

    >>> put({"w": torch.zeros(3, 1)}, [1], {"w": torch.ones(1, 1)})["w"].flatten()
    tensor([0., 1., 0.])
    """
    return {name: tensor.index_copy(0, _index(rows, tensor), new[name]) for name, tensor in models.items()}


def _index(rows: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, device=like.device)


def classifier(fed: Federation) -> list[str]:
    """The names of the tensors of the model's last layer, in the order in which it is executed: its head."""
    samples = fed.data.normalise(fed.data.x[:2], next(fed.model.parameters()).dtype)
    return list(layers(fed.model, samples)[-1].tensors)


def training_only(model: nn.Module, names: Sequence[str]) -> nn.Module:
    """A copy of the model in which only these parameters are trained."""
