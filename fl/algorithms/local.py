"""Local: every client trains alone; a rival in Chen et al., "Multi-Level Additive Modeling for Structured Non-IID
Federated Learning" (2024), section C.1.
"""

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.personal import row
from fl.base.rng import Rng
from fl.federation import Federation, traffic
from fl.federation.visit import Visit, kept, predicting, visit
from surgery import average


def local(fed: Federation) -> Algorithm:
    """Each client trains a model of its own, which nobody else ever sees: nothing is sent.

    A client that never took part still has the initial model. A stranger would get the mean of all clients' models,
    weighted by their numbers of training samples; nobody trains from it. With clients on other machines, who do not
    send their models, it stays the initial model.
    """
    METHOD.check(fed)
    return on_their_own(fed)


def on_their_own(fed: Federation) -> Algorithm:
    """The same, as a part of methods that do send something."""

    def at_client(received, mine, clients, rng):
        trained = fed.train(mine, clients, rng)
        return trained, trained.states

    alone = Visit("alone", at_client, withheld=list(fed.initial()))

    def init():
        start = fed.initial()
        return {"global": start, "personal": kept(fed, start)}

    def round(server, clients, rng):
        trained, personal = visit(fed, alone, {}, server["personal"], fed.initial(), clients, rng)
        mean = server["global"]
        if not fed.elsewhere:
            mean = fed.keep_frozen(personal, average(personal, weights=fed.clients.train.sizes))
        return {"global": mean, "personal": personal}, traffic.no_traffic(trained)

    def predict(server, images, client=None):
        if client is None:
            return fed.predict(server["global"], images)
        return fed.predict(row(server["personal"], client), images)

    def mine(received, kept, clients, rng):
        return kept

    def own(server):
        return predicting(fed, mine, {}, server["personal"], fed.initial(), Rng(0))

    return Algorithm(init, round, predict, own=own, visits=(alone,), mine=mine)


METHOD = Method(
    local,
    clients="own",
    refuses={"tampering": "sends nothing that could be tampered with"},
)
