"""Indep: Hu et al., "Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination" (KDD 2024),
section 3.1: FedMR's degenerate case.
"""

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedmr import FedMROptions, fedmr
from fl.algorithms.method import Method
from fl.federation import Federation


def indep(fed: Federation) -> Algorithm:
    """FedMR that sends K whole models from client to client; they are averaged only to be evaluated."""
    return fedmr(fed, FedMROptions(segment_fraction=1.0))


METHOD = Method(indep, lacks={"same_model"})
