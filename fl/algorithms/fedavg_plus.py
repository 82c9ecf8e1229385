"""FedAvg+: FedAvg; clients fine-tune the global model, as in the comparison of FeMAM (section C.1)."""

from dataclasses import dataclass

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.personal import fine_tuned
from fl.base.settings import Natural
from fl.federation import Federation


@dataclass(frozen=True)
class FedAvgPlusOptions:
    """FedAvg+."""

    epochs: Natural = 2
    """epochs for which every client fine-tunes the global model before it predicts (FeMAM's paper: 2); 0 is FedAvg"""


def fedavg_plus(fed: Federation, options: FedAvgPlusOptions = FedAvgPlusOptions()) -> Algorithm:
    """FedAvg; a client predicts with the global model fine-tuned on its own data, see `fine_tuned`."""
    return fine_tuned(fed, fedavg(fed), options.epochs)


METHOD = Method(fedavg_plus, FedAvgPlusOptions(), clients="personalized", mean_only=True)
