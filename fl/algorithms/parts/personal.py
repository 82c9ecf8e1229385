"""What methods with a model for each client share: taking the participants' models out and putting them back."""

import copy
import logging
from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from fl.base.errors import Diverged
from fl.base.rng import Rng
from fl.federation import Federation
from surgery import Stack, State, layers
from surgery.transfer import upload

_log = logging.getLogger("fl")


def take(models: Stack, rows: Sequence[int]) -> Stack:
    """The models of some rows of a stack, in that order.

    >>> take({"w": torch.tensor([[0.0], [1.0], [2.0]])}, [2, 0])["w"].flatten()
    tensor([2., 0.])
    """
    index = _index(rows, models)
    return {name: tensor.index_select(0, index) for name, tensor in models.items()}


def row(models: Stack, k: int) -> State:
    """The k-th model of a stack, as views.

    >>> row({"w": torch.tensor([[0.0], [1.0]])}, 1)
    {'w': tensor([1.])}
    """
    return {name: tensor[k] for name, tensor in models.items()}


def put(models: Stack, rows: Sequence[int], new: Stack) -> Stack:
    """The stack with its rows replaced; the given one is unchanged.

    >>> put({"w": torch.zeros(3, 1)}, [1], {"w": torch.ones(1, 1)})["w"].flatten()
    tensor([0., 1., 0.])
    """
    index = _index(rows, models)
    return {name: tensor.index_copy(0, index, new[name]) for name, tensor in models.items()}


def updated(models: Stack, clients: Sequence[int], new: Stack, sizes: Sequence[int]) -> Stack:
    """The population's models, with the participants' new ones; a client that was dropped keeps its old one.

    Args:
        models: a row for each client of the population. new: a row for each participant.
        sizes: the participants' numbers of samples, 0 if dropped, as in `fl.federation.trained.Trained`.

    >>> updated({"w": torch.zeros(3)}, [2, 0], {"w": torch.ones(2)}, sizes=[7, 0])["w"]
    tensor([0., 0., 1.])
    """
    rows = [row for row, size in enumerate(sizes) if size]
    return put(models, [clients[row] for row in rows], take(new, rows))


def trained_or_same(fed: Federation, starts: Stack, clients: Sequence[int], rng: Rng, *more) -> Stack:
    """The states of the clients' own models after `fed.train`. If all of them diverge, which is no reason to end a run,
    these are the states from which they started, and a warning is logged.
    """
    try:
        return fed.train(starts, clients, rng, *more).states
    except Diverged:
        _log.warning("warning: round %d: the clients' own models all diverged and are kept as they were", rng.round)
        return starts


def _index(rows: Sequence[int], models: Stack) -> Tensor:
    """The rows as a tensor on the device of the models."""
    return upload(torch.tensor(rows, dtype=torch.int64), next(iter(models.values())).device)


def classifier(model: nn.Module) -> list[str]:
    """The tensors of the model's classifier: its last linear layer in registration order (or else its last layer).

    >>> import zoo
    >>> classifier(zoo.create("lenet"))
    ['fc3.weight', 'fc3.bias']
    """
    found = layers(model)
    return list(([layer for layer in found if layer.kind == "Linear"] or found)[-1].tensors)


def trained_only(model: nn.Module, names: Collection[str]) -> nn.Module:
    """A copy of the model that trains only these of the parameters that the model trains.

    >>> import zoo
    >>> net = trained_only(zoo.create("lenet"), ["fc3.bias"])
    >>> [name for name, p in net.named_parameters() if p.requires_grad]
    ['fc3.bias']
    """
    model = copy.deepcopy(model)
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and name in names)
    return model
