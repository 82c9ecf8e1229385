"""Objectives and ascents, the only two hooks into local training.

Clients minimise an objective; an ascent says where they take its gradient. An objective takes (call, params, context,
batch) of one client and returns a scalar loss. `call(params, x)` runs the model in training mode with that client's
buffers; `context` is a dict of tensors that the algorithm passes for the client (anchors, masks); `batch` is (x, y), or
(x, y, per_sample) if the algorithm passes values for each sample (cached logits). x is a tensor, or a dict of them if
samples have several inputs. The engine differentiates the loss with respect to `params`.

An ascent takes (params, gradients) of one client and returns a step; the gradient at params + step, of the
same batch and with the same random numbers, then moves the client. That is sharpness-aware training.

Both depend on nothing but their arguments. What changes from round to round belongs in the context, since a CUDA graph
repeats the numbers that it was captured with.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fl.data.inputs import Inputs
from fl.engine import losses
from fl.engine.losses import Loss
from surgery import State

Call: TypeAlias = Callable[[State, Inputs], Tensor]
Batch: TypeAlias = tuple[Any, ...]
Objective: TypeAlias = Callable[[Call, State, Any, Batch], Tensor]
Ascent: TypeAlias = Callable[[State, State], State]


def cross_entropy(call: Call, params: State, context: Any, batch: Batch) -> Tensor:
    """Return the mean cross entropy over the batch.

    Of sequences, with logits [B, T, V] for y [B, T], the mean is over all their tokens.

    Of a model with exits, logits [B, exits, C], the sum over exits.
    """
    x, y = batch
    return losses.mean(losses.cross_entropy, call(params, x), y)


@lru_cache(maxsize=16)
def mean_of(loss: Loss) -> Objective:
    """Return the objective that is the mean of a loss over the batch.

    Of sequences with a label a token, over all tokens.

    Cached, because a new function would force a new graph capture.
    """
    if loss is losses.cross_entropy:
        return cross_entropy

    def mean_loss(call: Call, params: State, context: Any, batch: Batch) -> Tensor:
        x, y = batch
        return losses.mean(loss, call(params, x), y)

    return mean_loss


@lru_cache(maxsize=16)
def mask_absent_classes(objective: Objective = cross_entropy) -> Objective:
    """Return the objective with logits 0 for classes that the client does not have.

    They are those where the boolean context["held"] [classes] is False (HeteroFL's masked loss; Diao et al., ICLR 2021,
    section 3).

    Cached, because a new function would force a new graph capture.
    """

    def without(call: Call, params: State, context: Any, batch: Batch) -> Tensor:
        def zeroed(params: State, x: Tensor) -> Tensor:
            logits = call(params, x)
            return logits * context["held"].to(logits.dtype)

        return objective(zeroed, params, context, batch)

    return without


def proximal(mu: float, objective: Objective = cross_entropy) -> Objective:
    """Return the objective + mu/2 ||params - context["anchor"]||^2 (Li et al. 2020, eq. 2)."""

    def pulled(call: Call, params: State, context: Any, batch: Batch) -> Tensor:
        apart = torch.cat([(p - context["anchor"][name]).flatten() for name, p in params.items()])  # one sum, not many
        return objective(call, params, context, batch) + mu / 2 * apart.square().sum()

    return pulled


def with_logits(objective: Objective) -> Objective:
    """Return the objective of logits that are added to given ones (FeMAM, equation 8).

    With "share" in the context, a number for each client, the sum is multiplied by it (for the mean of several models'
    logits).
    """

    def added(call: Call, params: State, context: Any, batch: Batch) -> Tensor:
        x, y, before = batch

        def summed(params: State, x: Tensor) -> Tensor:
            logits = call(params, x) + before
            return logits * context["share"] if "share" in context else logits

        return objective(summed, params, context, (x, y))

    return added
