"""DepthFL: Kim et al., "DepthFL: Depthwise Federated Learning for Heterogeneous Clients" (ICLR 2023)."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.heterofl import HeteroFLOptions, heterofl
from fl.algorithms.method import Method
from fl.algorithms.parts.exits import check_exits, divergence, exit_log_probabilities, with_distillation
from fl.base.settings import AtLeast0, Natural
from fl.engine.losses import Loss, mean
from fl.engine.objectives import Batch, Call, Objective
from fl.federation import Federation
from surgery import State


@dataclass(frozen=True)
class DepthFLOptions:
    """DepthFL."""

    distil: AtLeast0 = 1.0
    """weight that the distillation among a client's exits reaches (the authors' code: 1); 0 leaves it out"""
    ramp: Natural = 300
    """rounds over which that weight rises (the authors' code: 300); with 0 it is there from the first round on"""


def depthfl(fed: Federation, options: DepthFLOptions = DepthFLOptions()) -> Algorithm:
    """Clients of several depths train all exits of their models, and the exits learn from each other.

    A client minimises the sum of its exits' losses, and for each exit the mean of KL(other's || its own) over the
    others, whose weight in round t, counted from 0, is distil * exp(-5 (1 - t / ramp)^2). Others are targets: no
    gradient flows into them. Each tensor is averaged over the clients that have it, who count alike. Without
    distillation this is HeteroFL, without its Scaler and own_rows, of models with exits.

    The authors' baseline for Flower adds FedDyn's regulariser unless told otherwise, and has attention and separable
    convolutions before the pooling of each exit but the last; here there is neither.

    Raises:
        FLError: for a model without exits, and for distillation if outputs are not logits of classes.
    """
    check_exits(fed, "depthfl", bool(options.distil))
    nested = heterofl(fed, HeteroFLOptions(scaler=False, own_rows=False))
    if not options.distil:
        return nested

    def weight(number):
        left = max(1 - (number - 1) / options.ramp, 0) if options.ramp else 0
        return options.distil * math.exp(-5 * left**2)

    return with_distillation(fed, nested, mutual(fed.local.loss), weight)


@lru_cache(maxsize=16)
def mutual(loss: Loss) -> Objective:
    """Return the exits' summed losses + context["distil"] * divergences among exits.

    Cached, because a new function would force a new graph capture.
    """

    def objective(call: Call, params: State, context: Any, batch: Batch) -> Tensor:
        x, y = batch
        outputs = call(params, x)
        exits = exit_log_probabilities(outputs)
        apart = divergence(exits.detach().unsqueeze(1), exits).sum()  # an exit is not apart from itself
        return mean(loss, outputs, y) + context["distil"] * apart / max(len(exits) - 1, 1)

    return objective


METHOD = Method(depthfl, DepthFLOptions(), clients="heterogeneous", lacks={"low_rank"})
