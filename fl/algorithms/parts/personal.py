"""Code that methods with a model for each client share."""

import copy
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fl.algorithms.algorithm import Algorithm, Server
from fl.algorithms.fedavg import fedavg
from fl.base.errors import Diverged
from fl.base.rng import Rng
from fl.federation import Federation
from fl.federation.client_models import personal, share_model
from fl.federation.clients import CLIENTS
from surgery import Stack, layers
from surgery.states import names_by_id

_log = logging.getLogger("fl")


def with_own_models(fed: Federation) -> Algorithm:
    """FedAvg; clients predict with personal models, which start as the initial model.

    Methods that train these replace the rest.
    """

    def init():
        start = fed.initial()
        return {"global": start, CLIENTS: fed.client_states(start)}

    def models(server):
        return personal(server[CLIENTS], len(fed.clients))

    return replace(fedavg(fed), init=init, models=models)


def train_or_keep(fed: Federation, starts: Stack, clients: Sequence[int], rng: Rng, *more) -> Stack:
    """Return the states of the personal models after `fed.train`.

    If all of them diverge, which is no reason to end a run, these are the states from which they started, and a warning
    is logged.
    """
    try:
        return fed.train(starts, clients, rng, *more).states
    except Diverged:
        _log.warning("warning: round %d: the personal models all diverged and are kept as they were", rng.round)
        return starts


def classifier(model: nn.Module) -> list[str]:
    """Return the tensors of the classifier: the last linear layer, or the last layer.

    Of a model with exits, all linear layers with as many outputs as the last one. Where a language model ties it to its
    table of tokens, it is that.

    >>> import zoo
    >>> classifier(zoo.create("lenet"))
    ['fc3.weight', 'fc3.bias']
    """
    for name, last in [item for item in model.named_modules() if type(item[1]) is nn.Linear][-1:]:
        names = names_by_id(model)
        head = [names[id(tensor)] for tensor in last._parameters.values() if id(tensor) in names]
        if head and not head[0].startswith(f"{name}."):
            return head
    candidates = layers(model)
    linear = [layer for layer in candidates if layer.kind == "Linear"] or candidates
    if not getattr(model, "exits", False):
        return list(linear[-1].tensors)
    outputs = {layer.name: len(next(model.get_submodule(layer.name).parameters())) for layer in linear}
    heads = [layer for layer in linear if outputs[layer.name] == outputs[linear[-1].name]]
    return [name for layer in heads for name in layer.tensors]


def train_only(model: nn.Module, names: Collection[str]) -> nn.Module:
    """Return a copy of the model that trains only these of its trained parameters.

    >>> import zoo
    >>> net = train_only(zoo.create("lenet"), ["fc3.bias"])
    >>> [name for name, p in net.named_parameters() if p.requires_grad]
    ['fc3.bias']
    """
    model = copy.deepcopy(model)
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and name in names)
    return model


def fine_tuned(fed: Federation, algorithm: Algorithm, epochs: int) -> Algorithm:
    """Return the method with clients that fine-tune the received model to predict.

    The rounds stay the same. A client fine-tunes on its own training data.

    A client that diverges keeps its start. Nothing more is sent than by the method itself.

    Args:
        epochs: how long clients fine-tune; with 0 this is the method itself.
    """
    if not epochs:
        return algorithm
    tuning = side_by_side(fed, epochs=epochs)
    return adapt_clients(algorithm, lambda models, clients, rng: train_or_keep(tuning, models, clients, rng))


def side_by_side(fed: Federation, **settings: Any) -> Federation:
    """Return the clients as they train apart from rounds, in chunks of a round's size.

    Args:
        settings: of their training, see `Federation.with_local`.
    """
    return fed.with_local(max_parallel_clients=fed.local.max_parallel_clients or fed.participants, **settings)


def adapt_clients(algorithm: Algorithm, adapt: Callable[[Stack, Sequence[int], Rng], Stack]) -> Algorithm:
    """Return the method with clients that adapt the received model to predict.

    Predictions are a function of the server alone, so the server also keeps the seed and the round ("rng", int64 on the
    CPU). Batches are sampled separately from the rounds'. The learning rate is the last round's: the next round may lie
    past the end of the schedule, where a cosine's is 0. A stranger gets the same model as there. The time of adapting
    counts as evaluation, not as part of a round.

    Args:
        adapt: (the models [K, ...] that clients are given, the clients, rng) -> what they make of them.
    """
    count = len(algorithm.fed.clients)

    def init():
        return {**algorithm.init(), "rng": _mark(Rng(0))}

    def aggregate(server, clients, update, rng):
        after, metrics = algorithm.aggregate_clients(server, clients, update, rng)
        return {**after, "rng": _mark(rng)}, metrics

    def models(server):
        client_models = algorithm.models(server) if algorithm.models else share_model(server["global"], count)
        return client_models._replace(rng=last_round(server))

    def personalize(models, client_states, clients, rng):
        return adapt(models, clients, rng.apart("fine-tune"))

    return replace(algorithm, init=init, aggregate=aggregate, models=models, personalize=personalize)


def last_round(server: Server) -> Rng:
    """Return the random streams of a server's last round, or of round 1."""
    seed, number = (int(server["rng"][name]) for name in ("seed", "round"))
    return Rng(seed, max(number, 1))


def _mark(rng: Rng) -> dict[str, torch.Tensor]:
    return {"seed": torch.tensor(rng.seed), "round": torch.tensor(rng.round)}
