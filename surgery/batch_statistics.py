"""Batch norms' statistics set right after weights were averaged."""

import copy
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import SurgeryError, first_line
from surgery.forward import call, copied, in_mode
from surgery.torch_private import BatchNorm


def repair(model: nn.Module, *, batches: Iterable[Any]) -> nn.Module:
    """A copy whose batch norms have the statistics of these batches, for a model whose weights were averaged.

    The mean of two models' running variances is not the variance that the mean of their weights has: features cancel,
    and it is smaller, layer by layer (Jordan et al., "REPAIR", ICLR 2023, section 3). With the statistics of the
    averaged model itself every channel has the mean and the variance that its norm says.

    Args:
        model: with batch norms; it is not changed.
        batches: inputs, as the model takes them; their means and (unbiased) variances are averaged. All else, such as
            dropout, runs in evaluation mode.

    Raises:
        SurgeryError: for a model without batch norms that keep statistics, and if it does not run on a batch.

    >>> import torch
    >>> net = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    >>> _ = net[0].weight.data.fill_(2), net[0].bias.data.fill_(1)
    >>> repaired = repair(net, batches=[torch.tensor([[0.0], [1.0], [2.0]])])
    >>> repaired[1].running_mean, repaired[1].running_var, net[1].running_mean
    (tensor([3.]), tensor([4.]), tensor([0.]))
    """
    if not isinstance(model, nn.Module):
        raise SurgeryError(f"repair runs the model: give a module, not a {type(model).__name__}")
    if isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        raise SurgeryError(f"batches is a list (or another iterable) of inputs, got a {type(batches).__name__}")
    twin = clone(model)
    norms = [m for m in twin.modules() if isinstance(m, BatchNorm) and m.running_mean is not None]
    if not norms:
        raise SurgeryError(
            f"{type(model).__name__} has no batch norm that keeps statistics: there is nothing to repair"
        )
    before = [(norm.momentum, copy.deepcopy(norm.num_batches_tracked)) for norm in norms]
    number = -1
    with in_mode(twin, training=False):
        for norm in norms:
            norm.reset_running_stats()
            norm.num_batches_tracked = None
            norm.train()
        for number, batch in enumerate(batches):
            for norm in norms:
                norm.momentum = 1 / (number + 1)  # the mean over all batches
            try:
                call(twin, copied(batch))
            except Exception as error:
                raise SurgeryError(
                    f"{type(model).__name__} does not run on batches[{number}]: {first_line(error)}; give inputs "
                    "without labels, two or more in a batch"
                ) from error
    if number < 0:
        raise SurgeryError("repair needs `batches`, at least one")
    for norm, (momentum, tracked) in zip(norms, before):
        norm.momentum, norm.num_batches_tracked = momentum, tracked
    return twin
