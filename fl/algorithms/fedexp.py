"""FedExP: Jhunjhunwala et al., "FedExP: Speeding Up Federated Averaging via Extrapolation" (ICLR 2023),
algorithm 1; its released code where the paper is silent.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.base.settings import AtLeast0, number
from fl.federation import Federation
from surgery import Stack, State, average, broadcast, stack
from surgery.transfer import double, upload


@dataclass(frozen=True)
class FedExPOptions:
    """FedExP."""

    eps: AtLeast0 = 0.001
    """added to the squared length of the mean update: the larger, the smaller the server's steps (the released
    code: 0.001 for CIFAR and 0.1 for EMNIST, times the number of participants)"""
    max_step: Annotated[float, number(float, least=1, zero=True)] = 0.0
    """largest step of the server; 0: no bound, 1 takes FedAvg's steps"""
    last_two: bool = True
    """deploy the mean of the last two iterates, to damp oscillation"""


def fedexp(fed: Federation, options: FedExPOptions = FedExPOptions()) -> Algorithm:
    """FedAvg; the server goes beyond the mean, the further the more the clients' updates disagree.

    The server's step multiplies the mean update of the trained parameters. Buffers (batch-norm statistics) are averaged
    as in FedAvg, since beyond the mean a variance could be negative. Clients start from "iterate". "global" is the mean
    of the last two iterates, buffers included; after the first round it is the one iterate that there is, as in the
    released code. That code also multiplies eps by the number of participants, and lets it fall with the square of its
    learning rate; here eps is a constant, as in the paper.

    A round reports its `server_step` among the metrics.
    """
    learnt = fed.trainable

    def init():
        start = fed.initial()
        return {"global": start, "iterate": start}

    def send(server, clients, rng):
        return {"model": broadcast(server["iterate"], len(clients))}

    def aggregate(server, clients, update, rng):
        mean = fed.average(update.received, update.sizes)
        params = {name: server["iterate"][name] for name in learnt}
        step = server_step(params, update.received, update.sizes, mean, options.eps)
        if options.max_step:
            step = min(step, options.max_step)
        iterate = mean | {name: torch.lerp(tensor, mean[name], step) for name, tensor in params.items()}
        both = options.last_two and rng.round > 1
        deployed = average(stack([server["iterate"], iterate])) if both else iterate
        return {"global": deployed, "iterate": iterate}, {"server_step": step}

    return replace(fedavg(fed), init=init, send=send, aggregate=aggregate)


def server_step(start: State, trained: Stack, sizes: tuple[int, ...], mean: State, eps: float) -> float:
    """Return the server's step, the paper's eta_g.

    eta_g = max(1, sum_i p_i ||D_i||^2 / (2 (||mean D||^2 + eps))). Waits for the device. Where the ratio overflows, or
    is 0 / 0, the step is 1.

    Args:
        start: what the K clients started from; the norms are taken over its tensors.
        trained: what became of it, a stack with these names at least.
        sizes: the clients' weights, p_i = size / sum; 0 for those that were dropped.
        mean: the mean of the trained models.

    >>> step = server_step({"w": torch.zeros(1)}, {"w": torch.tensor([[3.0], [-1.0]])}, (1, 1), {"w": torch.ones(1)}, 0)
    >>> step  # half of (9 + 1) / 2, over 1
    2.5
    """
    lengths = sum(double((trained[name] - tensor).flatten(1).norm(dim=1)).square() for name, tensor in start.items())
    whole = sum(double((mean[name] - tensor).norm()).square() for name, tensor in start.items())
    weights = upload(torch.tensor(sizes, dtype=torch.float64), lengths.device)
    ratio = ((weights @ lengths) / weights.sum() / (2 * (whole + eps))).item()
    return max(1.0, ratio) if math.isfinite(ratio) else 1.0


METHOD = Method(fedexp, FedExPOptions(), columns={"server_step": float})
