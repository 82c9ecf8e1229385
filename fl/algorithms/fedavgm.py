"""FedAvgM: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification"
(2019), section 4.3.
"""

from dataclasses import dataclass, replace
from typing import Annotated

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.base.settings import number
from fl.federation import Federation


@dataclass(frozen=True)
class FedAvgMOptions:
    """FedAvgM."""

    beta: Annotated[float, number(float, least=0, below=1)] = 0.9
    """momentum of the server; 0 is FedAvg (the paper: 0 to 0.99)"""
    lr: Annotated[float, number(float, above=0)] = 1.0
    """learning rate of the server; 1 is FedAvg's"""


def fedavgm(fed: Federation, options: FedAvgMOptions = FedAvgMOptions()) -> Algorithm:
    """FedAvg whose server moves with momentum: v ← beta v + D, w ← w + lr v, where D is the clients' mean update.

    Buffers (batch-norm statistics) are averaged as in FedAvg, since beyond the mean a variance could be negative.
    """

    def init():
        return {"global": fed.initial(), "velocity": fed.zeros()}

    def aggregate(server, clients, update, rng):
        old, mean = server["global"], fed.average(update.received, update.sizes)
        velocity = {name: options.beta * v + (mean[name] - old[name]) for name, v in server["velocity"].items()}
        moved = {name: old[name] + options.lr * v for name, v in velocity.items()}
        return {"global": mean | moved, "velocity": velocity}

    return replace(fedavg(fed), init=init, aggregate=aggregate)


METHOD = Method(fedavgm, FedAvgMOptions(), mean_only=True)
