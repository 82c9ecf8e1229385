"""FedYogi: Reddi et al., "Adaptive Federated Optimization" (ICLR 2021), algorithm 2."""

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedadam import FedAdamOptions, adaptive
from fl.algorithms.method import Method
from fl.federation import Federation


def fedyogi(fed: Federation, options: FedAdamOptions = FedAdamOptions()) -> Algorithm:
    """FedAvg whose server makes Yogi's step along the clients' mean update; see `fl.algorithms.fedadam.adaptive`.

    Its squares move towards the new one by a share of that, not of their distance: after large updates they fall
    slowly.
    """

    def squares(before, square):
        return before - (1 - options.beta2) * square * (before - square).sign()

    return adaptive(fed, options.lr, options.beta1, options.tau, squares)


METHOD = Method(fedyogi, FedAdamOptions(), mean_only=True)
