"""ZiCo, a score of an untrained network: Li et al., "ZiCo: Zero-shot NAS via Inverse Coefficient of Variation on
Gradients" (ICLR 2023). FedFA's clients choose their architectures by it (section 5.1).
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl.base.errors import FLError
from fl.engine.draws import Drawing, Draws
from fl.engine.objectives import Batch, Objective, cross_entropy
from fl.models.library import switch_off_dropout
from surgery import State
from surgery.transfer import widest

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def zico(
    model: nn.Module,
    batches: Sequence[Batch],
    objective: Objective = cross_entropy,
    context: Any = None,
) -> float:
    """Score a model by the sum over layers of log(sum of mean|g| / std(g)).

    The inner sum is over weights; a higher score is better. Mean and population standard deviation (of g, as in the
    released code; ZiCo's paper takes |g|) are over the batches; g is the gradient of the objective's mean over a batch
    in training mode. The layers are the linear and convolutional ones; only their weights count, not their biases.
    Weights whose gradient is the same in all batches are left out, and so are layers without any others. A weight that
    several layers share counts once.

    Dropout is off, so that candidates do not differ by luck. Whatever else the model draws is the same in every batch
    and call (see `fl.engine.draws`), and no global generator is read.

    Args:
        model: its weights are scored. The model does not change.
        batches: normalised inputs and their targets, on the model's device; at least 2, of different samples.
        objective, context: what clients minimise, see `fl.engine.objectives`.

    Returns:
        The score; NaN if a gradient is not finite.

    Raises:
        FLError: for fewer than 2 batches, for a model without such layers, and if no gradient differs between batches.

    >>> from zoo import create
    >>> generator = torch.Generator().manual_seed(0)
    >>> batches = [(torch.randn(8, 1, 28, 28, generator=generator), torch.arange(8)) for _ in range(2)]
    >>> narrow, wide = (create("cnn", torch.Generator().manual_seed(0), width=width) for width in (0.1, 0.5))
    >>> zico(narrow, batches) < zico(wide, batches)
    True
    """
    if len(batches) < 2:
        raise FLError(f"ZiCo compares the gradients of at least 2 batches, got {len(batches)}")
    model = copy.deepcopy(model).train()
    switch_off_dropout(model)
    params = dict(model.named_parameters())
    once = {id(layer.weight): layer.weight for layer in model.modules() if isinstance(layer, _LAYERS)}
    weights = [weight for weight in once.values() if weight.requires_grad]
    if not weights:
        raise FLError(
            f"{type(model).__name__} has no linear or convolutional layer to train: ZiCo cannot score it",
            code="unsupported",
        )

    def call(params: State, x: Tensor) -> Tensor:
        return functional_call(model, params, (x,))

    zeros = [torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) for weight in weights]
    moments = [(zero, zero.clone(), zero.clone()) for zero in zeros]  # sums of |g| and of (g - mean)^2, and the mean
    for number, batch in enumerate(batches, start=1):
        key = torch.zeros((), dtype=torch.int32, device=weights[0].device)
        with torch.enable_grad(), Drawing(Draws(key)):
            loss = objective(call, params, context, batch)
        gradients = torch.autograd.grad(loss, weights, materialize_grads=True)  # zeros for layers without a gradient
        for g, (magnitudes, squares, mean) in zip(gradients, moments):
            g = g.to(mean.dtype)
            magnitudes += g.abs()
            apart = g - mean
            mean.add_(apart, alpha=1 / number)  # Welford's update: equal gradients give exactly 0
            squares.addcmul_(apart, apart, value=1 - 1 / number)
    sums = []  # over the weights of each layer
    for magnitudes, squares, _ in moments:
        ratios = magnitudes / (squares * len(batches)).sqrt()  # mean|g| / std(g)
        sums.append(torch.where(squares == 0, 0, ratios).sum(dtype=widest(ratios.device)))
    counted = [value for value in torch.stack(sums).tolist() if value != 0]
    if not counted:
        raise FLError(
            "ZiCo finds no layer whose gradient differs between the batches: give other samples in each", code="data"
        )
    return sum(map(math.log, counted))
