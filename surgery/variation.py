"""How far apart the weights of models of different sizes are.

FedFA (Flexible Architectures, ECML-PKDD 2024; two other methods share the name), appendix 0.F.2, Table 10. It matches
norms before averaging because they are far apart.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.similarity import convolutions
from surgery.states import check_same
from surgery.submodel import Submodel
from surgery.submodel_checks import client_states


class Variation(NamedTuple):
    """The magnitude of a smallest model's weights, and the distance of K larger models from them, by convolution.

    Attributes:
        layers: names of the smallest model's L convolution weights.
        magnitude: [L], the mean L1 norm of its weight maps.
        distance: [K, L], the mean L1 norm of the difference between its maps and those in the same place of model k.

    All float64, on the CPU.
    """

    layers: tuple[str, ...]
    magnitude: Tensor
    distance: Tensor

    @property
    def ratio(self) -> Tensor:
        """[K], the mean distance over all convolutions, divided by the mean magnitude of the smallest model."""
        return self.distance.mean(1) / self.magnitude.mean()


def scale_variation(models: Sequence[Mapping[str, Tensor]], plans: Sequence[Submodel]) -> Variation:
    """How far larger models' weights are from those of a smaller one in the same place (FedFA, Table 10).

    A weight map is the kernel for one filter and one input channel; for a 1x1 kernel it is a single weight. Models
    without convolutions are measured by their linear layers.

    Args:
        models: states, the first one of the smallest model.
        plans: for each of the other models the plan of the smallest model within it: leading channels, first blocks.

    Raises:
        SurgeryError: if there are fewer than two models, if there is not one plan for each model after the first, or if
            a plan does not fit its models.

    >>> from surgery.submodel import Source
    >>> small, large = torch.ones(1, 1, 2, 2), torch.full((2, 1, 2, 2), 4.0)
    >>> plan = Submodel({"weight": (Source("weight", (((0, 1),), None, None, None)),)}, {"weight": (2, 1, 2, 2)})
    >>> found = scale_variation([{"weight": small}, {"weight": large}], [plan])
    >>> found.magnitude.item(), found.distance.item(), found.ratio.item()
    (4.0, 12.0, 3.0)
    """
    models = client_states(models)
    if not isinstance(plans, list | tuple) or not all(isinstance(plan, Submodel) for plan in plans):
        raise SurgeryError("give a list of plans (surgery.Submodel), one for each model after the first")
    if len(models) < 2 or len(plans) != len(models) - 1:
        raise SurgeryError(
            f"{len(models)} models and {len(plans)} plans: give the smallest model first, then larger ones, and for "
            "each of these a plan of the smallest within it"
        )
    smallest, *larger = models
    names = convolutions(smallest)
    if not names:
        raise SurgeryError("the smallest model has no weights of convolutions or linear layers to measure")
    weights = [smallest[name].detach().double() for name in names]
    distances = []
    for number, (model, plan) in enumerate(zip(larger, plans), 1):
        inside = plan.extract(model)
        check_same(smallest, inside, "the smallest model", f"what its plan reads from model {number}")
        distances.append([_mean_norm(w - inside[name].detach().to(w)) for name, w in zip(names, weights)])
    magnitude = torch.stack([_mean_norm(weight) for weight in weights]).cpu()
    return Variation(tuple(names), magnitude, torch.stack([torch.stack(row).cpu() for row in distances]))


def _mean_norm(weight: Tensor) -> Tensor:
    """The mean L1 norm of weight maps [Co, Ci, *kernel]."""
    return weight.abs().sum() / (weight.shape[0] * weight.shape[1])
