"""FedMut: Hu et al., "FedMut: Generalized Federated Learning via Stochastic Mutation" (AAAI 2024), algorithm 1."""

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.base.errors import naming
from fl.base.settings import AtLeast0, AtLeast1, Share, one_of
from fl.federation import Federation
from surgery import broadcast, layers, permutations
from surgery.transfer import upload


@dataclass(frozen=True)
class FedMutOptions:
    """FedMut."""

    radius: AtLeast0 = 5.0
    """length of a mutation, in the global model's last step (FedMut's paper and code: 4, FedMR's code: 5); 0 is
    FedAvg, if clients count by their samples (weighted)"""
    unit: Annotated[str, one_of("layer", "block", "tensor")] = "layer"
    """what gets one sign: layer (with all its tensors), block (residual blocks whole) or tensor (each on its own, as
    the released code does)"""
    beta: Share = 0.3
    """share by which backward mutations are shortened in the first round (the paper's beta_0: 0.3, and 0.5 for
    ResNet-18)"""
    beta_rounds: AtLeast1 = 100
    """rounds in which beta falls to 0 (FedMut's code: 50; FedMR's: 100)"""
    weighted: bool = False
    """whether clients count by their numbers of samples; alike, as in the released code, mutations cancel"""


def fedmut(fed: Federation, options: FedMutOptions = FedMutOptions()) -> Algorithm:
    """FedAvg; K clients start from K mutants of the global model, shifted along its last step, layer by layer.

    The i-th mutant goes to the i-th sampled client. Only trained parameters mutate: a shifted running variance could
    become negative (the released code shifts these too). There are no mutants before the second round, since the global
    model has to take a step first. Clients count alike, as in the released code, so that mutations cancel in the mean;
    weighted by the number of samples they do not, and training may diverge where clients differ much in size.
    """
    learnt = fed.trainable
    with naming("--fedmut.unit"):
        groups = [[name for name in layer.tensors if name in learnt] for layer in layers(fed.model, unit=options.unit)]

    def init():
        start = fed.initial()
        return {"global": start, "previous": start}

    def send(server, clients, rng):
        current, before = server["global"], server["previous"]
        past = max(rng.round - 2, 0)  # rounds with mutants
        beta = options.beta * (1 - min(past / options.beta_rounds, 1))  # equation 5
        shifts = options.radius * signs(len(groups), len(clients), beta, rng.torch("mutate"))
        factors = upload(shifts, fed.data.device)
        starts = broadcast(current, len(clients))
        for row, names in zip(factors, groups):
            for name in names:
                shift = current[name] - before[name]
                starts[name] = current[name] + row.to(shift).view(-1, *[1] * shift.ndim) * shift
        return {"model": starts}

    def aggregate(server, clients, update, rng):
        weights = update.sizes if options.weighted else update.arrived
        return {"global": fed.average(update.received, weights), "previous": server["global"]}

    return replace(fedavg(fed), init=init, send=send, aggregate=aggregate)


def signs(n: int, k: int, beta: float, generator: torch.Generator) -> Tensor:
    """Return the signs of n layers in k mutants, [n, k].

    Half of each row is 1, the other half beta - 1, in random order. With beta 0 each row sums to zero. Of an odd number
    of mutants the last has no partner and does not move: 0.

    >>> signs(2, 5, 0.25, torch.Generator().manual_seed(0)).sort(1).values[0].tolist()
    [-0.75, -0.75, 0.0, 1.0, 1.0]
    """
    pairs = torch.tensor([1.0, beta - 1.0] * (k // 2))
    return torch.cat([pairs[permutations(n, len(pairs), generator=generator)], torch.zeros(n, k % 2)], dim=1)


METHOD = Method(fedmut, FedMutOptions(), mean_only=True)
