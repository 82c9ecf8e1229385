"""FedFA: Park and Joe-Wong, "Federated Learning with Flexible Architectures" (ECML-PKDD 2024), algorithms 1 to 3.
(Two other methods are called FedFA: feature anchors, and feature augmentation.)
"""

from dataclasses import dataclass

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.submodels import Deployed, train_submodels
from fl.base.errors import FLError
from fl.federation import Federation
from fl.models.fleet import alone
from surgery import layers, submodel_factors

_SCALES = ("norm", "rms", "none")


@dataclass(frozen=True)
class FedFAOptions:
    """FedFA."""

    graft: bool = True
    """whether a client's last block of a section counts for the deeper ones that it lacks (algorithm 2)"""
    scale: str = "norm"
    """what clients' layers are brought to the same of before they are averaged: norm (of algorithm 1, line 18), rms
    (the norm by the root of the number of weights, which does not enlarge a layer for being narrow) or none"""
    quantile: float = 0.95
    """share of a layer's weights, the smallest in magnitude, that its norm is taken over"""

    def unread(self, name: str) -> str:
        """Why an option says nothing beside the others; "" where it does."""
        return "--fedfa.scale is none: give norm or rms" if name == "quantile" and self.scale == "none" else ""


def fedfa(fed: Federation, options: FedFAOptions = FedFAOptions()) -> Algorithm:
    """Send each client the part of the global model that it has an architecture for; graft, scale and average.

    The plans are the distribution (algorithm 3) and the grafting (algorithm 2) in one: what is read from a section's
    last block of the client is written to all deeper ones. A block that changes the width and has to stand for
    deeper ones stands for their leading channels, as line 19 has it.

    A layer is a module with all its parameters, which have one norm and one factor: the norm of a bias alone, which
    starts at 0, would say nothing. Buffers (running statistics, where norms keep some) are averaged and not scaled. The
    paper ranks weights for the percentile without saying whether signed; these are ranked by magnitude. The mean of
    line 18 runs over the participants that were not dropped.

    With `norm`, narrow layers are enlarged and wide ones made smaller in every round, for having fewer or more weights;
    what only wide clients have shrinks until they differ no more. `rms` leaves that out.

    With one architecture and scale="none" this is FedAvg.
    """
    if options.scale not in _SCALES:
        raise FLError(f"unknown --fedfa.scale {options.scale!r}: there are {', '.join(_SCALES)}")
    if not 0 < options.quantile <= 1:
        raise FLError(f"--fedfa.quantile is a share above 0 and up to 1, got {options.quantile}")
    fleet = fed.architectures
    kinds = [kind.plan if options.graft else alone(kind.plan) for kind in fleet.architectures]
    learnt = dict(fed.model.named_parameters())
    groups = [tuple(name for name in layer.tensors if name in learnt) for layer in layers(fed.model)]

    def plan(client):
        return kinds[fleet.owned[client]]

    def init():
        return {"global": fed.initial()}

    def round(server, clients, rng):
        plans = [plan(client) for client in clients]
        trained = train_submodels(fed, server["global"], plans, clients, rng)  # lines 6-10
        factors = None
        if options.scale != "none":  # lines 12 and 18
            factors = submodel_factors(
                trained.sent, plans, q=options.quantile, groups=groups, weights=trained.sizes, measure=options.scale
            )
        mean = fed.average_submodels(trained.sent, plans, server["global"], trained.sizes, factors)  # lines 14-24
        return {"global": mean}, trained

    parts = Deployed(fed, plan)
    return Algorithm(init, round, parts.predict, plan=plan, own=parts.own)


METHOD = Method(fedfa, FedFAOptions(), clients="mixed")
