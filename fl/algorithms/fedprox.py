"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020), algorithm 2."""

from dataclasses import dataclass, replace

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.base.settings import AtLeast0
from fl.engine.objectives import proximal
from fl.federation import Federation


@dataclass(frozen=True)
class FedProxOptions:
    """FedProx."""

    mu: AtLeast0 = 0.01
    """weight of the proximal term (FedMR's paper: 0.01 for CIFAR-10, 0.001 for CIFAR-100, 0.1 for FEMNIST)"""


def fedprox(fed: Federation, options: FedProxOptions = FedProxOptions()) -> Algorithm:
    """FedAvg; clients also minimise mu/2 ||w - w_global||^2, over the trained parameters. mu = 0 is FedAvg."""
    objective = proximal(options.mu, fed.local.objective)

    def client(message, client_states, clients, rng):
        start = message["model"]
        return fed.train(start, clients, rng, objective, {"anchor": start})

    return replace(fedavg(fed), client=client)


METHOD = Method(fedprox, FedProxOptions(), mean_only=True)
