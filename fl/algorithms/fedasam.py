"""FedASAM: Caldarola et al., "Improving Generalization in Federated Learning by Seeking Flat Minima" (ECCV 2022),
section 4.2, with the adaptive sharpness of Kwon et al., "ASAM" (ICML 2021), equation 5.
"""

from dataclasses import dataclass, replace

import torch

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.base.settings import AtLeast0
from fl.engine.objectives import Ascent
from fl.federation import Federation
from surgery import State


@dataclass(frozen=True)
class FedASAMOptions:
    """FedASAM."""

    rho: AtLeast0 = 0.1
    """how far clients look for a higher loss before they take its gradient; 0 is FedAvg"""
    eta: AtLeast0 = 0.0
    """added to the magnitude of every weight, so that small ones are moved as well"""


def fedasam(fed: Federation, options: FedASAMOptions = FedASAMOptions()) -> Algorithm:
    """FedAvg; clients step along the gradient at the worst point near their weights, which leads to flat minima.

    Each step takes two passes over its batch. Batch-norm statistics come from the first pass, at the weights
    themselves. The paper also combines it with an average of the weights over rounds (FedASAM + SWA); that is left out.
    """
    ascent = adaptive_ascent(options.rho, options.eta)

    def client(message, client_states, clients, rng):
        return fed.train(message["model"], clients, rng, ascent=ascent)

    return replace(fedavg(fed), client=client)


def adaptive_ascent(rho: float, eta: float = 0.0) -> Ascent:
    """Return the step rho T^2 g / ||T g|| against the gradient's sharpness.

    T is |w| + eta for each entry w of a tensor called a weight, and 1 for biases and all others.

    The norm is taken over all parameters. If weights are scaled so that the model stays the same, the step is scaled
    with them.

    >>> step = adaptive_ascent(0.1)({"weight": torch.tensor([-2.0])}, {"weight": torch.tensor([3.0])})
    >>> step["weight"]  # |w| further up
    tensor([0.2000])
    """

    def ascend(params: State, gradients: State) -> State:
        scale = {
            name: params[name].abs() + eta if "weight" in name else torch.ones_like(gradient)
            for name, gradient in gradients.items()
        }
        scaled = {name: scale[name] * gradient for name, gradient in gradients.items()}
        norm = sum(g.square().sum() for g in scaled.values()).sqrt()
        reach = rho / (norm + 1e-16)  # no slope, no step; the squares of tiny slopes are 0
        return {name: reach * scale[name] * g for name, g in scaled.items()}

    return ascend


METHOD = Method(fedasam, FedASAMOptions(), mean_only=True)
