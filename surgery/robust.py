"""The trimmed mean and the median of submodels, element by element of the full model."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from surgery.averaging import check_trim, middle
from surgery.deprecated import formerly
from surgery.errors import SurgeryError
from surgery.states import State, as_state
from surgery.submodel import Submodel
from surgery.submodel_checks import check_clients, client_scales, client_states, client_weights
from surgery.submodel_index import ascending, pieces


@formerly("states plans fallback trim weights factors")
def trimmed_mean_submodels(
    states: Sequence[Mapping[str, Tensor]],
    plans: Sequence[Submodel],
    *,
    trim: float,
    weights: Tensor | Sequence[float] | None = None,
    factors: Mapping[str, Tensor] | None = None,
    fallback: Mapping[str, Tensor],
) -> State:
    """`trimmed_mean`, element by element of the full model, over the clients whose plan covers the element.

    Equal to embedding every state and taking `trimmed_mean`, but only one tensor of the full model is held for each
    client at a time.

    Args:
        states, plans, fallback: as for `average_submodels`.
        trim: in [0, 0.5].
        weights: [K]. A client of weight 0 is ignored; the others have the same weight.
        factors: [K] by name of the full model's tensors: client k's values there are first multiplied by them (FedFA's
            scales). Names left out have factor 1; integer tensors ignore theirs.

    Returns:
        A state of the full model with the fallback's dtypes and devices.

    Raises:
        SurgeryError: for everything that `average_submodels` and `trimmed_mean` refuse.

    >>> from surgery.submodel import Source
    >>> narrow = Submodel({"w": (Source("w", (((0, 1),),)),)}, {"w": (2,)})
    >>> wide = Submodel({"w": (Source("w", (None,)),)}, {"w": (2,)})
    >>> states = [{"w": torch.tensor([1.0])}, {"w": torch.tensor([2.0, 4.0])}, {"w": torch.tensor([9.0, 6.0])}]
    >>> trimmed_mean_submodels(states, [narrow, wide, wide], trim=0.5, fallback={"w": torch.zeros(2)})
    {'w': tensor([2., 5.])}
    """
    states, fallback = client_states(states), as_state(fallback, "the fallback")
    check_clients(states, plans, fallback)
    scales = client_scales(factors, len(states), fallback)
    check_trim(trim)
    row = client_weights(weights, len(states))
    parts = {name: {} for name in fallback}  # by client what it has of the tensor
    for k in row.nonzero().flatten().tolist():
        for name, sources in plans[k].entries.items():
            for source in sources:
                parts[source.name].setdefault(k, []).append((states[k][name].detach(), source.index))
    result = {}
    with torch.no_grad():
        for name, keep in fallback.items():
            values = keep.new_zeros(len(parts[name]), *keep.shape)
            covered = torch.zeros_like(values, dtype=torch.bool)
            found = [(i, k, *part) for i, (k, own) in enumerate(parts[name].items()) for part in own]
            for i, k, small, index in found:
                if small.is_floating_point() != keep.is_floating_point():
                    raise SurgeryError(f"tensor {name!r} is {keep.dtype} in the fallback and {small.dtype} in a state")
                if name in scales and keep.is_floating_point():
                    small = small * scales[name][k]
                small, index = ascending(small, index)
                for place, piece in pieces(values[i], small, index):
                    place.copy_(piece)
                for place, _ in pieces(covered[i], small, index):
                    place.fill_(True)
            result[name] = middle(name, values, covered, trim, keep)
    return result
