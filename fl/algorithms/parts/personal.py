"""What methods with a model for each client share."""

import copy
import logging
from collections.abc import Collection, Sequence
from dataclasses import replace

from torch import nn

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.base.errors import Diverged
from fl.base.rng import Rng
from fl.federation import Federation
from fl.federation.client_models import personal
from fl.federation.clients import CLIENTS
from surgery import Stack, layers

_log = logging.getLogger("fl")


def with_own_models(fed: Federation) -> Algorithm:
    """FedAvg whose clients predict with models of their own, which begin as the initial model.

    Methods that train these replace the rest.
    """

    def init():
        start = fed.initial()
        return {"global": start, CLIENTS: fed.client_states(start)}

    def models(state):
        return personal(state[CLIENTS], len(fed.clients))

    return replace(fedavg(fed), init=init, models=models)


def trained_or_same(fed: Federation, starts: Stack, clients: Sequence[int], rng: Rng, *more) -> Stack:
    """The states of the clients' own models after `fed.train`. If all of them diverge, which is no reason to end a run,
    these are the states from which they started, and a warning is logged.
    """
    try:
        return fed.train(starts, clients, rng, *more).states
    except Diverged:
        _log.warning("warning: round %d: the clients' own models all diverged and are kept as they were", rng.round)
        return starts


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
