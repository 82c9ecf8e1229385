"""Checks of submodels that are to be combined."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from surgery.averaging import weight_rows
from surgery.errors import SurgeryError
from surgery.states import as_state, check_same
from surgery.submodel import Submodel


def client_weights(weights: Tensor | Sequence[float] | None, k: int) -> Tensor:
    """Weights [K] in float64 on the CPU; SurgeryError if they are not valid."""
    row = weight_rows(weights, k, True)
    if row.ndim != 1:
        raise SurgeryError(f"weights have shape {tuple(row.shape)}: expected [{k}], one for each client")
    return row


def client_scales(
    factors: Mapping[str, Tensor | Sequence[float]] | None, k: int, full: Mapping[str, Tensor]
) -> dict[str, list[float]]:
    """Factors [K] by name of the full model's tensors as numbers; SurgeryError if they are not valid."""
    try:
        given = {name: torch.as_tensor(factor) for name, factor in (factors or {}).items()}
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise SurgeryError(f"factors are numbers [{k}] by name, as submodel_factors gives them: {error}") from None
    for name, factor in given.items():
        if name not in full:
            raise SurgeryError(f"factors name {name!r}, but the full model has no such tensor")
        if factor.shape != (k,):
            raise SurgeryError(
                f"factors of {name!r} have shape {tuple(factor.shape)}: expected [{k}], one for each client"
            )
    scales = {name: factor.tolist() for name, factor in given.items()}
    if bad := [name for name, row in scales.items() if not all(map(math.isfinite, row))]:
        raise SurgeryError(f"factors of {bad[0]!r} are {scales[bad[0]]}: they must be finite")
    return scales


def client_states(states: Sequence[Mapping[str, Tensor] | nn.Module]) -> list[Mapping[str, Tensor]]:
    """A list of states, of which some may have been given as modules; SurgeryError for anything else."""
    if not isinstance(states, list | tuple):
        raise SurgeryError(f"give a list of states, one for each client, not a {type(states).__name__}")
    return [as_state(values, f"state {k}") for k, values in enumerate(states)]


def check_clients(
    states: Sequence[Mapping[str, Tensor]], plans: Sequence[Submodel], fallback: Mapping[str, Tensor] | None = None
) -> None:
    """SurgeryError unless each state matches its plan, and all plans (and the fallback) are of one full model."""
    if not isinstance(plans, list | tuple) or not all(isinstance(plan, Submodel) for plan in plans):
        raise SurgeryError("give a list of plans (surgery.Submodel), one for each state")
    if len(states) != len(plans) or not states:
        raise SurgeryError(
            f"{len(states)} states and {len(plans)} plans: give one plan for each state, and at least one state"
        )
    distinct = {id(plan): plan for plan in plans}  # clients often share a plan
    fingerprints = {key: plan.fingerprint for key, plan in distinct.items()}
    shapes = {key: _shapes(plan.small_shapes) for key, plan in distinct.items()}
    for k, (values, plan) in enumerate(zip(states, plans)):
        if fingerprints[id(plan)] != fingerprints[id(plans[0])]:
            raise SurgeryError(
                f"plan {k} is of the full model {fingerprints[id(plan)]}, plan 0 of {fingerprints[id(plans[0])]}: "
                "only submodels of one full model can be averaged"
            )
        check_same(shapes[id(plan)], values, f"plan {k}", f"state {k}")
    if fallback is not None:
        check_same(_shapes(plans[0].shapes), fallback, "the plans' full model", "the fallback")


def _shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Tensors without data, for `check_same`."""
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
