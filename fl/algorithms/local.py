"""Local: every client trains alone; a rival in Chen et al., "Multi-Level Additive Modeling for Structured Non-IID
Federated Learning" (2024), section C.1.
"""

from dataclasses import replace

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.own_models import OwnModels
from fl.federation import Federation
from fl.federation.clients import CLIENTS


def local(fed: Federation) -> Algorithm:
    """Train on each client a personal model, and send nothing.

    Clients may have models of several architectures: see `OwnModels`, also for the model of a stranger.

    A client that never took part still has the initial model. A stranger would get the mean of all clients' models,
    weighted by their numbers of training samples; no client trains from it. With clients on other machines, who do not
    send their models, it stays the initial model.
    """

    own_models = OwnModels(fed)

    def send(server, clients, rng):
        return {}

    def client(message, client_states, clients, rng):
        update = fed.train(own_models.unpack(client_states, clients), clients, rng)
        return update._replace(received={}, client_states=own_models.pack(update.states))

    def aggregate(server, clients, update, rng):
        return {"global": own_models.mean(server[CLIENTS], otherwise=server["global"])}

    return replace(own_models.algorithm(), send=send, client=client, aggregate=aggregate)


METHOD = Method(local, clients="personalized", own_architectures=True, lacks={"changed_updates"})
