"""FedFA's scaling factors of submodels. No model is ever embedded in full size."""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.percentile import joint_norms
from surgery.scale import checked_groups, matching_factors
from surgery.submodel import Submodel
from surgery.submodel_checks import check_clients, client_states, client_weights
from surgery.submodel_index import Index, ascending, repeats

_Part: TypeAlias = tuple[str, Index]


def submodel_factors(
    states: Sequence[Mapping[str, Tensor]],
    plans: Sequence[Submodel],
    *,
    q: float = 0.95,
    groups: Sequence[Sequence[str]] | None = None,
    weights: Tensor | Sequence[float] | None = None,
    measure: Literal["norm", "rms"] = "norm",
) -> dict[str, Tensor]:
    """The factors that scale each tensor of different small models to the mean of their percentile norms.

    alpha_c = mean_k ||Wq_k|| / ||Wq_c|| (FedFA, Alg. 1, line 18), where k runs over the clients that have weight and
    cover something of the tensor. Equal to the factors that `match_norms` gives for the embedded models of these
    clients with their masks. `average_submodels(states, plans, weights=..., factors=..., fallback=...)` then does lines
    16-22.

    Args:
        states: K small models' states.
        plans: where each state lies, all in one full model. A tensor with several sources, as in a grafted block,
            counts at each of them.
        q: the quantile, in [0, 1]; see `percentile_norm`.
        groups: names of the full model's tensors that have one norm and one factor together, as
            `segments(layers(model))` gives them. A client's norm is that of the tensors that it has of them. By default
            each tensor is a group.
        weights: [K], non-negative: clients of weight 0 are ignored, all others count alike. None: all count.
        measure: `norm` is the paper's. `rms` divides it by the square root of the number of entries in it, so that a
            narrow model is not scaled up merely because it has fewer entries.

    Returns:
        [K], float64, on the CPU, by name of the full model's tensors, except those that are integers in the states. A
        client without weight, with nothing of the group or with only zeros (or almost, see `match_norms`) gets factor 1
        and is not counted in the mean; tensors in no group have factor 1.

    Raises:
        SurgeryError: for q out of range, an unknown measure, states that do not match their plans, groups that name a
            tensor twice or an unknown one, and for NaN or infinity in a state with weight.

    >>> from surgery.submodel import Source
    >>> narrow = Submodel({"w": (Source("w", (((0, 1),),)),)}, {"w": (2,)})
    >>> wide = Submodel({"w": (Source("w", (None,)),)}, {"w": (2,)})
    >>> states = [{"w": torch.tensor([3.0])}, {"w": torch.tensor([3.0, 4.0])}]
    >>> submodel_factors(states, [narrow, wide], q=1.0)["w"]
    tensor([1.3333, 0.8000], dtype=torch.float64)
    """
    if not isinstance(measure, str) or measure not in ("norm", "rms"):
        raise SurgeryError(f"unknown measure {repr(measure)[:40]}: choose norm or rms")
    states = client_states(states)
    check_clients(states, plans)
    members = client_weights(weights, len(states)).nonzero().flatten().tolist()
    parts = {id(plan): _parts(plan) for plan in plans}  # clients often share a plan
    small = [parts[id(plan)] for plan in plans]
    integers = {
        full
        for c, held in enumerate(small)
        for full, own in held.items()
        if not all(_real(states[c][n]) for n, _ in own)
    }
    floating = {name: None for name in plans[0].shapes if name not in integers}
    groups = checked_groups(groups, plans[0].shapes, floating, "the full model")
    # A block that stands for others has the same norm everywhere, so it is computed only once.
    rows: dict[tuple[int, tuple[_Part, ...]], int] = {}
    place = torch.zeros(len(groups), len(states), dtype=torch.int64)  # of the norm of each group and client; 0 for none
    for g, group in enumerate(groups):
        for c in members:
            own = (part for name in group for part in small[c].get(name, ()))
            if held := tuple(sorted(own, key=lambda part: (part[0], str(part[1])))):
                place[g, c] = rows.setdefault((c, held), len(rows) + 1)
    jobs = [[ascending(states[c][n].detach(), index)[0] for n, index in held] for c, held in rows]
    found = joint_norms([[], *jobs], q)
    norms = found[:, 0] if measure == "norm" else found[:, 0] / found[:, 1].sqrt().clamp(min=1)
    alpha = matching_factors(norms[place])
    for g, c in norms[place].isnan().nonzero()[:1].tolist():
        raise SurgeryError(f"{', '.join(groups[g])} of state {c} hold NaN or infinity: give this client weight 0")
    factors = {name: row for group, row in zip(groups, alpha) for name in group}
    return {name: factors.get(name, torch.ones(len(states), dtype=torch.float64)) for name in floating}


def _parts(plan: Submodel) -> dict[str, list[_Part]]:
    """What the small model has of each of the full model's tensors."""
    result: dict[str, list[_Part]] = {}
    for name, sources in plan.entries.items():
        for source in sources:  # an index matters only if it repeats positions, of which one counts
            result.setdefault(source.name, []).append((name, source.index if repeats(source.index) else ()))
    return result


def _real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
