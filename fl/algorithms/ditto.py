"""Ditto: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization" (ICML 2021), algorithm 1."""

from dataclasses import dataclass, replace

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.personal import train_or_keep, with_own_models
from fl.base.settings import AtLeast0
from fl.engine.objectives import proximal
from fl.federation import Federation


@dataclass(frozen=True)
class DittoOptions:
    """Ditto."""

    lam: AtLeast0 = 0.1
    """weight of the proximal term that pulls a client's personal model to the global one (FeMAM's paper: 0.1); 0 trains
    it alone"""


def ditto(fed: Federation, options: DittoOptions = DittoOptions()) -> Algorithm:
    """FedAvg; beside it each participant trains a personal model v, pulled by lam/2 ||v - w||^2 to the global one.

    w is the global model that the participant received; the pull is on the trained parameters. Both models train
    equally long, on the same batches and with the same optimizer; only the global one is sent. Personal models start
    from the initial model and continue from where they were; a client that never took part still has the initial model.
    A client whose global model diverges is dropped, and its personal model stays as it was; one whose personal model
    diverges still counts in the average.

    lam = 0 is FedAvg beside Local.
    """
    objective = proximal(options.lam, fed.local.objective)

    def client(message, client_states, clients, rng):
        start = message["model"]
        update = fed.train(start, clients, rng)
        return update._replace(
            client_states=train_or_keep(fed, client_states, clients, rng, objective, {"anchor": start})
        )

    def aggregate(server, clients, update, rng):
        return {"global": fed.average(update.received, update.sizes)}

    return replace(with_own_models(fed), client=client, aggregate=aggregate)


METHOD = Method(ditto, DittoOptions(), clients="personalized", mean_only=True)
