"""Adapters out of a model that was fine-tuned whole: the best ones of a rank."""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from surgery.adapters.layer import is_transposed
from surgery.adapters.model import adapted_layers, add, attach, state
from surgery.adapters.rank import Factors, factors, name_factors, resize
from surgery.errors import SurgeryError
from surgery.names import join
from surgery.states import as_state, check_same, compute_dtype
from surgery.states import state as whole_state

_log = logging.getLogger(__name__)


class Extracted(NamedTuple):
    """A base with the adapters that bring it nearest to a fine-tuned model.

    Attributes:
        model: with adapters; their scale is 1.
        error: of each adapted layer ||W' - W - B A|| / ||W' - W||; no smaller one is possible at this rank.
        left: the tensors that fine-tuning has changed, and that are in no adapter.
    """

    model: nn.Module
    error: dict[str, float]
    left: tuple[str, ...]


def extract(
    base: nn.Module,
    tuned: nn.Module | Mapping[str, Tensor],
    rank: int,
    *,
    modules: Sequence[str] | None = None,
    train: Sequence[str] = (),
) -> Extracted:
    """Put adapters on a base that approximate what fine-tuning changed in its weights.

    Each product B A is the change W' - W cut to its largest singular values (Eckart and Young), in equal parts in A and
    B. Biases, norms and layers without an adapter stay the base's, with a warning, unless `train` names their modules.

    Args:
        base: the model before fine-tuning; it is not changed, and the result shares its memory.
        tuned: the model afterwards, or its state.
        rank: of all adapters.
        modules: the layers that get adapters, as for `add`; those that are equal in both models get none.
        train: modules whose tensors are taken whole, such as norms and a new classifier; names or patterns.

    Raises:
        SurgeryError: for models of other tensors, where no layer differs, and as `add` does.

    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> tuned = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> near, error, left = extract(net, tuned, rank=2, modules=["2"], train=["0"])
    >>> list(error), round(error["2"], 6), left
    (['2'], 0.0, ('2.bias',))
    """
    before, after = whole_state(base), as_state(tuned, "the tuned model")
    check_same(before, after, "the base", "the tuned model")
    model = add(base, rank, modules=modules, train=train)
    changes, taken = {}, state(model)
    for name, layer in adapted_layers(model):
        weight = join(name, "weight")
        dtype = compute_dtype(before[weight].dtype)
        change = after[weight].to(before[weight].device, dtype) - before[weight].to(dtype)
        if change.is_meta or not change.isfinite().all():
            raise SurgeryError(f"{weight!r} has values that are not finite, or none (meta device)", code="values")
        if change.any():
            changes |= _exact(name, layer.base_layer, change).state
    if not changes:
        raise SurgeryError("no layer that may have an adapter differs in the two models", code="argument")
    best, error = resize(changes, rank)
    whole = {name: after[name].to(before[name]) for name in factors(taken)[1]}
    covered = {*whole, *(join(name, "weight") for name in error)}
    left = tuple(n for n, t in before.items() if n not in covered and not torch.equal(t, after[n].to(t.device)))
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        _log.warning("changed by fine-tuning, and in no adapter: %s%s; name their modules in train", left[0], more)
    return Extracted(attach(base, best | whole, train=train), error, left)


def _exact(name: str, layer: nn.Module, change: Tensor) -> Factors:
    """Return a weight's change as an adapter of full rank; one matrix is the identity."""
    matrix = change.T if is_transposed(layer) else change.flatten(1)
    kernel = () if is_transposed(layer) else change.shape[2:]
    out, into = matrix.shape
    a, b = (torch.eye(into).to(matrix), matrix) if into < out else (matrix, torch.eye(out).to(matrix))
    if kernel:
        a, b = a.unflatten(1, (-1, *kernel)), b.view(*b.shape, *(1 for _ in kernel))
    return name_factors(name, layer, a, b)
