"""FedFA: Park and Joe-Wong, "Federated Learning with Flexible Architectures" (ECML-PKDD 2024), algorithms 1 to 3.
(Two other methods are called FedFA: feature anchors, and feature augmentation.)
"""

from dataclasses import dataclass
from typing import Annotated

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.submodels import submodel_algorithm
from fl.base.settings import OnlyWith, number, one_of
from fl.federation import Federation
from fl.models.fleet import ungrafted
from surgery import layers
from surgery.scale import norm_factors

_SCALES = ("norm", "rms", "none")


@dataclass(frozen=True)
class FedFAOptions:
    """FedFA."""

    graft: bool = True
    """graft: a client's last block of a section counts for the deeper ones that it lacks (the paper's algorithm 2)"""
    scale: Annotated[str, one_of(*_SCALES)] = "norm"
    """scale clients' layers to the same norm before averaging (the paper's algorithm 1, line 18), to the same rms (the
    norm divided by the root of the number of weights, which does not enlarge narrow layers), or not at all: none"""
    quantile: Annotated[float, number(float, above=0, most=1), OnlyWith("scale", "norm", "rms")] = 0.95
    """share of a layer's weights, the smallest in magnitude, over which its norm is computed (the paper: 0.95)"""


def fedfa(fed: Federation, options: FedFAOptions = FedFAOptions()) -> Algorithm:
    """Send each client the part of the global model that it has an architecture for; graft, scale and average.

    A plan does the distribution (algorithm 3) and the grafting (algorithm 2) at once: the client's last block of a
    section is written back to all deeper blocks of the global model. A block that changes the width, and has to stand
    for deeper ones, stands for their leading channels, as in line 19.

    A layer is a module with all its parameters, which have one norm and one factor together: the norm of a bias alone,
    which starts at 0, would say nothing. Buffers (running statistics, where norms keep some) are averaged but not
    scaled. The paper does not say whether the percentile ranks weights with their sign; here they are ranked by
    magnitude. The mean of line 18 is taken over the participants that were not dropped.

    With `norm`, narrow layers grow and wide ones shrink in every round, just because they have fewer or more weights;
    what only wide clients have shrinks until the widths no longer differ. `rms` does without that.

    With one architecture and scale="none" this is FedAvg.
    """
    fleet = fed.fleet_or_uniform
    kinds = [kind.plan if options.graft else ungrafted(kind.plan) for kind in fleet.architectures]
    learnt = dict(fed.model.named_parameters())
    groups = [tuple(name for name in layer.tensors if name in learnt) for layer in layers(fed.model)]

    def plan(client):
        return kinds[fleet.owned[client]]

    def aggregate(server, clients, update, rng):
        plans, factors = [plan(client) for client in clients], None
        if options.scale != "none":  # lines 12 and 18
            factors = norm_factors(
                update.received, plans, q=options.quantile, groups=groups, weights=update.sizes, measure=options.scale
            )
        mean = fed.average(update.received, update.sizes, server["global"], plans=plans, factors=factors)  # 14-24
        return {"global": mean}

    return submodel_algorithm(fed, plan, aggregate)  # line 6


METHOD = Method(fedfa, FedFAOptions(), clients="heterogeneous")
