"""Local: every client trains alone; a rival in Chen et al., "Multi-Level Additive Modeling for Structured Non-IID
Federated Learning" (2024), section C.1.
"""

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.personal import put, row, take
from fl.federation import Federation, traffic
from fl.federation.own import personal
from surgery import average, broadcast


def local(fed: Federation) -> Algorithm:
    """Each client trains a model of its own, which nobody else ever sees: nothing is sent.

    A client that never took part still has the initial model. A stranger would get the mean of all clients' models,
    weighted by their numbers of training samples; nobody trains from it.
    """
    METHOD.check(fed)
    return on_their_own(fed)


def on_their_own(fed: Federation) -> Algorithm:
    """The same, as a part of methods that do send something."""

    def init():
        start = fed.initial()
        return {"global": start, "personal": broadcast(start, len(fed.clients))}

    def round(server, clients, rng):
        trained = fed.train(take(server["personal"], clients), clients, rng)
        personal = put(server["personal"], clients, trained.states)
        mean = fed.keep_frozen(personal, average(personal, weights=fed.clients.train.sizes))
        return {"global": mean, "personal": personal}, traffic.no_traffic(trained)

    def predict(server, images, client=None):
        if client is None:
            return fed.predict(server["global"], images)
        return fed.predict(row(server["personal"], client), images)

    return Algorithm(init, round, predict, own=lambda server: personal(server["personal"]))


METHOD = Method(
    local,
    clients="own",
    refuses={
        "tampering": "sends nothing that could be tampered with",
        "elsewhere": "sends nothing, so that each client can train on its own",
    },
)
