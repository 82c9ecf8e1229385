"""FedAdagrad: Reddi et al., "Adaptive Federated Optimization" (ICLR 2021), algorithm 2."""

from dataclasses import dataclass
from typing import Annotated

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedadam import adaptive
from fl.algorithms.method import Method
from fl.base.settings import number
from fl.federation import Federation


@dataclass(frozen=True)
class FedAdagradOptions:
    """FedAdagrad."""

    lr: Annotated[float, number(float, above=0)] = 0.01
    """learning rate of the server (the paper tunes it between 0.001 and 10)"""
    beta1: Annotated[float, number(float, least=0, below=1)] = 0.0
    """momentum of the clients' mean update (the paper: 0)"""
    tau: Annotated[float, number(float, above=0)] = 0.001
    """degree of adaptivity, added to the root of the squares: the larger, the less these matter (the paper: 0.001)"""


def fedadagrad(fed: Federation, options: FedAdagradOptions = FedAdagradOptions()) -> Algorithm:
    """FedAvg; the server makes Adagrad's step along the clients' mean update: all past squares have equal weight.

    See `fl.algorithms.fedadam.adaptive`.
    """
    return adaptive(fed, options.lr, options.beta1, options.tau, lambda before, square: before + square)


METHOD = Method(fedadagrad, FedAdagradOptions(), mean_only=True)
