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
from fl.models.fleet import remove_grafting
from surgery import layers
from surgery.scale import norm_factors

_SCALES = ("norm", "rms", "none")


@dataclass(frozen=True)
class FedFAOptions:
    """FedFA."""

    graft: bool = True
    """graft: a client's last block of a section also stands for the deeper blocks that the client lacks (the paper's
    algorithm 2)"""
    scale: Annotated[str, one_of(*_SCALES)] = "norm"
    """scale clients' layers before averaging: norm (to the same norm, algorithm 1, line 18), rms (to the same norm
    divided by the root of the number of weights, so that narrow layers do not grow) or none (no scaling)"""
    quantile: Annotated[float, number(float, above=0, most=1), OnlyWith("scale", "norm", "rms")] = 0.95
    """share of a layer's weights from which the norm is computed: the weights with the smallest magnitudes (the paper:
    0.95)"""


def fedfa(fed: Federation, options: FedFAOptions = FedFAOptions()) -> Algorithm:
    """Send each client its part of the global model; graft, scale and average the trained parts.

    One plan describes the distribution (algorithm 3) and the grafting (algorithm 2): it writes the client's last block
    of a section back to all deeper blocks of the section in the global model. If the last block changes the width, it
    stands for the leading channels of the deeper blocks, as in line 19.

    A layer is a module with all its parameters. They have one norm and one factor together: a bias starts at 0, so its
    norm alone would say nothing. Buffers (such as running statistics) are averaged but not scaled. The paper does not
    say whether the percentile ranks weights with their sign; here they are ranked by magnitude. The mean of line 18 is
    taken over the participants that were not dropped.

    With `norm`, narrow layers grow and wide layers shrink in every round, only because they have fewer or more weights.
    The weights that only wide clients have shrink until the widths no longer differ. `rms` avoids this.

    With one architecture and scale="none" this is FedAvg.
    """
    fleet = fed.fleet_or_uniform
    architecture_plans = [
        architecture.plan if options.graft else remove_grafting(architecture.plan)
        for architecture in fleet.architectures
    ]
    parameters = dict(fed.model.named_parameters())
    groups = [tuple(name for name in layer.tensors if name in parameters) for layer in layers(fed.model)]

    def plan(client):
        return architecture_plans[fleet.owned[client]]

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
