"""Local: every client trains alone; a rival in Chen et al., "Multi-Level Additive Modeling for Structured Non-IID
Federated Learning" (2024), section C.1.
"""

from collections.abc import Sequence

import torch

from fl import traffic
from fl.algorithm import Algorithm
from fl.federation import Federation
from fl.personal import put, take
from surgery import Stack, average, broadcast


def local(fed: Federation) -> Algorithm:
    """Each client's own model, which nobody else ever sees: nothing is sent.

    A client that never took part has the initial model still. What a stranger would get is the mean of all clients'
    models by their numbers of training samples; nobody trains from it.
    """

    def init():
        start = fed.initial()
        return {"global": start, "personal": broadcast(start, len(fed.clients))}

    def round(server, clients, rng):
        trained = fed.train(take(server["personal"], clients), clients, rng)
        personal = put(server["personal"], clients, trained.states)
        return {"global": average(personal, fed.clients.train.sizes), "personal": personal}, traffic.none(trained)

    def predict(server, images, client=None):
        if client is None:
            return fed.predict(server["global"], images)
        return fed.predict({name: tensor[client] for name, tensor in server["personal"].items()}, images)

    return Algorithm(init, round, predict)


def updated(models: Stack, clients: Sequence[int], new: Stack, sizes: Sequence[int]) -> Stack:
    """The population's models with the participants' new ones; those of clients that were dropped stay what they were.

    Args:
        models: a row for each client of the population. new: a row for each participant.
        sizes: the participants' numbers of samples, 0 if dropped, as in `fl.engine.Trained`.

    >>> updated({"w": torch.zeros(3)}, [2, 0], {"w": torch.ones(2)}, sizes=[7, 0])["w"]
    tensor([0., 0., 1.])
    """
    arrived, before = torch.tensor([size > 0 for size in sizes]), take(models, clients)
    rows = {
        name: torch.where(arrived.to(tensor.device).view(-1, *[1] * (tensor.ndim - 1)), tensor, before[name])
        for name, tensor in new.items()
    }
    return put(models, clients, rows)
