"""ScaleFL: Ilhan et al., "ScaleFL: Resource-Adaptive Federated Learning With Heterogeneous Clients" (CVPR 2023)."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any

import torch
from torch import Tensor

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.heterofl import HeteroFLOptions, heterofl
from fl.algorithms.method import Method
from fl.algorithms.parts.exits import check_exits, divergence, exit_log_probabilities, with_distillation
from fl.base.settings import Above0, AtLeast0, Natural, one_of
from fl.engine.losses import Loss, mean
from fl.engine.objectives import Batch, Call, Objective
from fl.federation import Federation
from surgery import State
from zoo import Spec


@dataclass(frozen=True)
class ScaleFLOptions:
    """ScaleFL."""

    distil: AtLeast0 = 0.05
    """weight of the distillation from a client's last exit (the authors' code: 0.05 for AG News, where it divides the
    divergence by the number of classes, too, and else 0); 0 leaves it out"""
    temperature: Above0 = 3.0
    """temperature T of the distillation; T² multiplies the loss (the authors' code: 3)"""
    start: Natural = 0
    """number of first rounds without distillation (the authors' code: a quarter of all, and one)"""
    exits: Annotated[str, one_of("rising", "equal")] = "rising"
    """how the exits of a model count: rising, the j-th of n by j / (1 + ... + n) as in the authors' code, or equal, the
    sum of their losses as in other methods"""
    scaler: bool = True
    """divide activations by the width rate while training, as HeteroFL does (zoo models only)"""

    def adapt(self, spec: Spec) -> Spec:
        """Return the models that the method trains."""
        return HeteroFLOptions(scaler=self.scaler).adapt(spec)


def scalefl(fed: Federation, options: ScaleFLOptions = ScaleFLOptions()) -> Algorithm:
    """Clients' models are narrower and end earlier, and their earlier exits learn from the last one.

    A client minimises the weighted sum of its exits' losses, each but the last with distil * temperature^2 times
    KL(last exit's || its own) beside it, of predictions at the temperature. The last exit is a target: no gradient
    flows into it. Each element is averaged over the clients that hold it, who count alike. With equal exits and without
    distillation this is HeteroFL, without own_rows, of models with exits.

    This loss is from the authors' released code. That code lets the gradient flow into the last exit as well, and
    distils only if told to. It places exits between any two blocks, with three convolutions before their pooling, and
    scores the mean of their accuracies. Here there is an exit after each section, which only pools, and the mean of the
    exits' logits predicts.

    Raises:
        FLError: for a model without exits, and for distillation if outputs are not logits of classes.
    """
    check_exits(fed, "scalefl", bool(options.distil))
    nested = heterofl(fed, HeteroFLOptions(scaler=options.scaler, own_rows=False))
    if not options.distil and options.exits == "equal":
        return nested
    objective = from_the_last(fed.local.loss, options.temperature, options.exits == "rising", bool(options.distil))
    return with_distillation(fed, nested, objective, lambda number: options.distil * (number > options.start))


@lru_cache(maxsize=16)
def from_the_last(loss: Loss, temperature: float, rising: bool, distils: bool) -> Objective:
    """Return the exits' losses + context["distil"] * divergences from the last exit.

    Cached, because a new function would force a new graph capture.
    """

    def objective(call: Call, params: State, context: Any, batch: Batch) -> Tensor:
        x, y = batch
        outputs = call(params, x)
        losses = torch.stack([mean(loss, of_one, y) for of_one in outputs.unbind(1)])
        if distils:
            exits = exit_log_probabilities(outputs / temperature)
            losses = losses + context["distil"] * temperature**2 * divergence(exits[-1].detach(), exits)
        if rising:
            place = torch.arange(1, len(losses) + 1, device=losses.device, dtype=losses.dtype)
            losses = losses * place / place.sum()
        return losses.sum()

    return objective


METHOD = Method(scalefl, ScaleFLOptions(), clients="heterogeneous", lacks={"low_rank"})
