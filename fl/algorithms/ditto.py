"""Ditto: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization" (ICML 2021), algorithm 1."""

from dataclasses import dataclass

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.local import on_their_own
from fl.algorithms.method import Method
from fl.algorithms.parts.personal import trained_or_same
from fl.base.settings import AtLeast0
from fl.engine.objectives import proximal
from fl.federation import Federation
from fl.federation.visit import Visit, visit
from surgery import broadcast


@dataclass(frozen=True)
class DittoOptions:
    """Ditto."""

    lam: AtLeast0 = 0.1
    """how strongly a client's own model is drawn to the global one (FeMAM's paper: 0.1); 0 trains it alone"""


def ditto(fed: Federation, options: DittoOptions = DittoOptions()) -> Algorithm:
    """FedAvg; beside it each participant trains a model v of its own, pulled by lam/2 ||v - w||^2 to the global one.

    w is the global model that the participant received; the pull is on the trained parameters. Both models train
    equally long, on the same batches and with the same optimizer; only the global one is sent. Personal models start
    from the initial model and go on from where they were; a client that never took part still has the initial model. A
    client whose global model diverges is dropped, and its own model stays as it was; one whose own model diverges still
    counts in the average.

    lam = 0 is FedAvg beside Local.
    """
    METHOD.check(fed, options)
    objective = proximal(options.lam)

    def at_client(received, mine, clients, rng):
        trained = fed.train(received, clients, rng)
        return trained, trained_or_same(fed, mine, clients, rng, objective, {"anchor": received})

    both = Visit("both", at_client)

    def round(server, clients, rng):
        start = broadcast(server["global"], len(clients))
        trained, personal = visit(fed, both, start, server["personal"], fed.initial(), clients, rng)
        return {"global": fed.average(trained.received, trained.sizes), "personal": personal}, trained

    return on_their_own(fed)._replace(round=round, visits=(both,))


METHOD = Method(ditto, DittoOptions(), clients="own")
