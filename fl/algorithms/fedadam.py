"""FedAdam: Reddi et al., "Adaptive Federated Optimization" (ICLR 2021), algorithm 2."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated

from torch import Tensor

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.base.settings import number
from fl.federation import Federation


@dataclass(frozen=True)
class FedAdamOptions:
    """FedAdam and FedYogi."""

    lr: Annotated[float, number(float, above=0)] = 0.03
    """learning rate of the server (the paper tunes it between 0.001 and 10)"""
    beta1: Annotated[float, number(float, least=0, below=1)] = 0.9
    """momentum of the clients' mean update (the paper: 0.9)"""
    beta2: Annotated[float, number(float, least=0, below=1)] = 0.99
    """memory of its squares (the paper: 0.99)"""
    tau: Annotated[float, number(float, above=0)] = 0.001
    """degree of adaptivity, added to the root of the squares: the larger, the less these matter (the paper: 0.001)"""


def fedadam(fed: Federation, options: FedAdamOptions = FedAdamOptions()) -> Algorithm:
    """FedAvg; the server makes Adam's step along the clients' mean update; see `adaptive`."""

    def squares(before, square):
        return options.beta2 * before + (1 - options.beta2) * square

    return adaptive(fed, options.lr, options.beta1, options.tau, squares)


def adaptive(
    fed: Federation, lr: float, beta1: float, tau: float, squares: Callable[[Tensor, Tensor], Tensor]
) -> Algorithm:
    """FedAvg; the server scales the clients' mean update by the root of its squares.

    It takes the update as a gradient. The squares are of the mean update, as in the paper's fifth version on arXiv, in
    Flower and in FL-bench, not of the momentum. As in the paper the moments have no bias correction, and the squares
    begin at tau^2. Buffers (batch-norm statistics) are averaged as in FedAvg.

    Args:
        squares: (the squares so far, the square of the mean update) -> the new ones: what FedAdagrad, FedAdam and
            FedYogi differ in.
    """

    def init():
        zeros = fed.zeros()
        variance = {name: zero + tau**2 for name, zero in zeros.items()}
        return {"global": fed.initial(), "momentum": zeros, "variance": variance}

    def aggregate(server, clients, update, rng):
        old, mean = server["global"], fed.average(update.received, update.sizes)
        step = {name: mean[name] - old[name] for name in server["momentum"]}
        momentum = {name: beta1 * m + (1 - beta1) * step[name] for name, m in server["momentum"].items()}
        seconds = {name: squares(v, step[name].square()) for name, v in server["variance"].items()}
        moved = {name: old[name] + lr * m / (seconds[name].sqrt() + tau) for name, m in momentum.items()}
        return {"global": mean | moved, "momentum": momentum, "variance": seconds}

    return replace(fedavg(fed), init=init, aggregate=aggregate)


METHOD = Method(fedadam, FedAdamOptions(), mean_only=True)
