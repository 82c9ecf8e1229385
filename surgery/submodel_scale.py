"""FedFA's scaling factors of submodels, each read where it lies: no model is ever embedded in full size."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.percentile import joint_norms
from surgery.scale import checked_groups, matching_factors
from surgery.submodel import Submodel
from surgery.submodel_checks import check_clients, client_weights


def submodel_factors(
    states: Sequence[Mapping[str, Tensor]],
    plans: Sequence[Submodel],
    q: float = 0.95,
    groups: Sequence[Sequence[str]] | None = None,
    weights: Tensor | Sequence[float] | None = None,
    measure: Literal["norm", "rms"] = "norm",
) -> dict[str, Tensor]:
    """The factors that bring each tensor of mixed small models to the mean of their percentile norms.

    alpha_c = mean_k ||Wq_k|| / ||Wq_c|| (FedFA, Alg. 1, line 18), over the clients k that have weight and cover
    something of the tensor. Equal to what `match_norms` gives for the embedded models of these clients with their
    masks. `average_submodels(states, plans, fallback, weights, factors=...)` is then lines 16-22.

    Args:
        states: K small models' states.
        plans: where each lies; all of one full model. Where a tensor has several sources, as a grafted block has, its
            norm counts at each.
        q: the quantile, in [0, 1]; see `percentile_norm`.
        groups: names of the full model that have one norm and one factor together, as `segments(layers(model))` gives
            them. A client's norm runs over what it has of them. Default: each tensor on its own.
        weights: [K], non-negative: only who has any takes part, how much makes no difference. None: all do.
        measure: `norm` is the paper's. `rms` divides it by the square root of the number of entries it counts, so
            that a narrow model is not scaled up merely because it has fewer.

    Returns:
        [K], float64, on the CPU, by name of the full model's tensors, without those that states hold as integers. A
        client that has no weight, nothing of the group, or only zeros (or next to, see `match_norms`) gets factor 1 and
        is not counted in the mean; tensors in no group have factor 1.

    Raises:
        SurgeryError: for q out of range, an unknown measure, states that do not match their plans, groups that name a
            tensor twice or an unknown one, and for NaN and infinity in a state with weight.

    >>> from surgery.submodel import Source
    >>> narrow = Submodel({"w": (Source("w", (((0, 1),),)),)}, {"w": (2,)})
    >>> wide = Submodel({"w": (Source("w", (None,)),)}, {"w": (2,)})
    >>> states = [{"w": torch.tensor([3.0])}, {"w": torch.tensor([3.0, 4.0])}]
    >>> submodel_factors(states, [narrow, wide], q=1.0)["w"]
    tensor([1.3333, 0.8000], dtype=torch.float64)
    """
    if measure not in ("norm", "rms"):
        raise SurgeryError(f"unknown measure {measure!r}: choose norm or rms")
    check_clients(states, plans)
    members = client_weights(weights, len(states)).nonzero().flatten().tolist()
    small = [{source.name: name for name, own in plan.entries.items() for source in own} for plan in plans]
    integers = {full for names, state in zip(small, states) for full, name in names.items() if not _real(state[name])}
    floating = {name: None for name in plans[0].shapes if name not in integers}
    groups = checked_groups(groups, plans[0].shapes, floating, "the full model")
    # A block that stands for others has their norm as well: it is computed once.
    rows: dict[tuple[int, tuple[str, ...]], int] = {}
    place = torch.zeros(len(groups), len(states), dtype=torch.int64)  # of each group's and client's norm; 0 is none
    for g, group in enumerate(groups):
        for c in members:
            if held := tuple(sorted(small[c][name] for name in group if name in small[c])):
                place[g, c] = rows.setdefault((c, held), len(rows) + 1)
    found = joint_norms([[], *([states[c][name] for name in held] for c, held in rows)], q)
    norms = found[:, 0] if measure == "norm" else found[:, 0] / found[:, 1].sqrt().clamp(min=1)
    alpha = matching_factors(norms[place])
    for g, c in norms[place].isnan().nonzero()[:1].tolist():
        raise SurgeryError(f"{', '.join(groups[g])} of state {c} hold NaN or infinity: give this client weight 0")
    factors = {name: row for group, row in zip(groups, alpha) for name in group}
    return {name: factors.get(name, torch.ones(len(states), dtype=torch.float64)) for name in floating}


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
