"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020), algorithm 2."""

from dataclasses import dataclass

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.base.settings import AtLeast0
from fl.engine.objectives import proximal
from fl.federation import Federation
from surgery import broadcast


@dataclass(frozen=True)
class FedProxOptions:
    """FedProx."""

    mu: AtLeast0 = 0.01
    """weight of the proximal term (FedMR's paper: 0.01 for CIFAR-10, 0.001 for CIFAR-100, 0.1 for FEMNIST)"""


def fedprox(fed: Federation, options: FedProxOptions = FedProxOptions()) -> Algorithm:
    """FedAvg whose clients also minimise mu/2 ||w - w_global||^2, over the trained parameters. mu = 0 is FedAvg."""
    METHOD.check(fed, options)
    objective = proximal(options.mu)

    def round(server, clients, rng):
        start = broadcast(server["global"], len(clients))
        trained = fed.train(start, clients, rng, objective, {"anchor": start})
        return {"global": fed.average(trained.received, trained.sizes)}, trained

    return fedavg(fed)._replace(round=round)


METHOD = Method(fedprox, FedProxOptions())
