"""Repair of averaged models: the statistics that averaging shrinks."""

import copy
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from surgery.averaging.common import weight_rows
from surgery.copying import clone
from surgery.errors import SurgeryError, explain
from surgery.forward import call, copy_tensors, in_mode
from surgery.names import join
from surgery.states import as_state, check_same, state
from surgery.torch_private import BatchNorm

_log = logging.getLogger(__name__)


def repair(
    model: nn.Module,
    *,
    batches: Iterable[Any],
    ends: Sequence[nn.Module] = (),
    weights: Sequence[float] | Tensor | None = None,
) -> nn.Module:
    """Return a copy of an averaged model with the right statistics of its features.

    The mean of two models' running variances is not the variance that the mean of their weights has: features cancel,
    and it is smaller, layer by layer (Jordan et al., "REPAIR", ICLR 2023, section 3). With the statistics of the
    averaged model itself every channel has the mean and the variance that its norm says. A model without batch norm
    needs the `ends`: each channel that a linear layer or convolution gives, but for the last layer, is then scaled and
    shifted. Its mean and its standard deviation become the weighted means over the ends (section 3.2).

    Args:
        model: with batch norms, or with `ends`; it is not changed.
        batches: inputs, as the model takes them; the means and (unbiased) variances of what each norm gets are averaged
            over its calls. A norm that none of them reaches keeps its statistics, which is logged. All else, such as
            dropout, runs in evaluation mode.
        ends: the models that were averaged, of the same architecture, where there is no batch norm.
        weights: by which they were averaged; they need not sum to one. None gives all the same.

    Raises:
        SurgeryError: for a model without batch norms that keep statistics and without ends, if it does not run on a
            batch, and for ends with batch norms, or with a layer that has no bias, does not run once in a pass, or has
            a weight that is shared or computed (weight norm).

    >>> net = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    >>> _ = net[0].weight.data.fill_(2), net[0].bias.data.fill_(1)
    >>> repaired = repair(net, batches=[torch.tensor([[0.0], [1.0], [2.0]])])
    >>> repaired[1].running_mean, repaired[1].running_var, net[1].running_mean
    (tensor([3.]), tensor([4.]), tensor([0.]))
    """
    if not isinstance(model, nn.Module):
        raise SurgeryError(f"repair runs the model: give a module, not a {type(model).__name__}", code="argument")
    if isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        raise SurgeryError(f"batches is a list or another iterable, got a {type(batches).__name__}", code="argument")
    twin = clone(model)
    norms = [m for m in twin.modules() if isinstance(m, BatchNorm) and m.running_mean is not None]
    if ends or weights is not None:
        if norms or not ends:
            problem = (
                "has batch norms: leave out ends and weights" if norms else "was averaged by weights: give its ends"
            )
            raise SurgeryError(f"{type(model).__name__} {problem}", code="argument")
        return _rescale(twin, list(batches), list(ends), weight_rows(weights, len(ends), False))
    if not norms:
        raise SurgeryError(f"{type(model).__name__} has no norm with statistics: give its `ends`", code="unsupported")
    before = [(norm.momentum, copy.deepcopy(norm.num_batches_tracked)) for norm in norms]
    calls: dict[nn.Module, int] = dict.fromkeys(norms, 0)

    def count(norm: Any, _: Any) -> None:
        if not calls[norm]:  # what was there may be NaN, which no momentum takes away
            norm.running_mean.zero_()
            norm.running_var.fill_(1)
        calls[norm] += 1
        norm.momentum = 1 / calls[norm]  # the mean over all calls

    hooks = [norm.register_forward_pre_hook(count) for norm in norms]
    with in_mode(twin, training=False, own_draws=False):
        for norm in norms:
            norm.num_batches_tracked = None
            norm.train()
        _run(twin, batches)
    for hook, norm, (momentum, tracked) in zip(hooks, norms, before):
        hook.remove()
        norm.momentum, norm.num_batches_tracked = momentum, tracked
    if idle := [name for name, module in twin.named_modules() if calls.get(module) == 0]:
        _log.warning("%s keep their statistics: the batches do not run them", ", ".join(idle))
    return twin


def _run(model: nn.Module, batches: Iterable[Any]) -> None:
    """Run a model on each batch; SurgeryError if there is none or one fails."""
    number = -1
    for number, batch in enumerate(batches):
        problem = f"{type(model).__name__} does not run on batches[{number}]"
        with explain(problem, "; give inputs without labels, two or more in a batch"):
            call(model, copy_tensors(batch))
    if number < 0:
        raise SurgeryError("repair needs `batches`, at least one", code="argument")


class _Moments:
    """The count, sum and sum of squares of a layer's channels, and its number of runs."""

    def __init__(self, layer: nn.Module):
        self.runs, self._after = 0, -1 if isinstance(layer, nn.Linear) else 1  # the axis of channels
        self.sums = [torch.zeros((), dtype=torch.float64)] * 3

    def __call__(self, layer: nn.Module, _: Any, result: Tensor) -> None:
        rows = result.detach().cpu().double().movedim(self._after, 0).flatten(1)
        self.runs += 1
        self.sums = [a + b for a, b in zip(self.sums, (torch.tensor(rows.shape[1]), rows.sum(1), rows.square().sum(1)))]

    @property
    def mean_and_deviation(self) -> Tensor:
        n, total, squares = self.sums
        return torch.stack([total / n, (squares / n - (total / n) ** 2).clamp(min=0).sqrt()])


def _moments(model: nn.Module, batches: Sequence[Any], names: Iterable[str]) -> dict[str, _Moments]:
    """Return the moments of these layers, in the order in which they end."""
    moments: dict[str, _Moments] = {}
    layers = {name: model.get_submodule(name) for name in names}

    def record(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        return lambda *call: moments.setdefault(name, _Moments(layers[name]))(*call)

    hooks = [layer.register_forward_hook(record(name)) for name, layer in layers.items()]
    try:
        with in_mode(model, training=False):
            _run(model, batches)
    finally:
        for hook in hooks:
            hook.remove()
    return moments


_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SCALED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *_TRANSPOSED)


def _rescale(model: nn.Module, batches: list[Any], ends: list[nn.Module], weights: Tensor) -> nn.Module:
    """Return the model itself with rescaled layers, one after the other.

    A channel that is constant is only shifted.
    """
    if weights.ndim != 1:
        raise SurgeryError("repair needs one weight for each of the ends", code="argument")
    for number, end in enumerate(ends):
        check_same(state(model), as_state(end, f"ends[{number}]"), "the model", f"ends[{number}]")
    names = [name for name, layer in model.named_modules() if isinstance(layer, _SCALED)]
    if others := [
        join(name, key)
        for name, module in model.named_modules()
        for key, p in module._parameters.items()
        if p is not None and p.ndim > 1 and not isinstance(module, (*_SCALED, nn.Embedding))
    ]:
        _log.warning("repair scales linear layers and convolutions alone: what %s gives stays as it is", others[0])
    shared = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    seen = [_moments(end, batches, names) for end in ends]
    order = list(seen[0])
    for name in names:
        if name not in seen[0] or any(moments[name].runs != len(batches) for moments in seen):
            raise SurgeryError(f"{name!r} does not run once in a pass: it cannot be set right", code="unsupported")
        weight = model.get_submodule(name)._parameters.get("weight")
        if name != order[-1] and (weight is None or shared[id(weight)] > 1):
            why = "is computed: remove its parametrization (weight norm, pruning)" if weight is None else "is shared"
            raise SurgeryError(f"the weight of {name!r} {why}, so that it cannot be set right", code="unsupported")
        if name != order[-1] and model.get_submodule(name).bias is None:
            raise SurgeryError(f"{name!r} has no bias that could set its mean: give it zeros", code="unsupported")
    for name in order[:-1]:
        layer: Any = model.get_submodule(name)
        mean, deviation = _moments(model, batches, [name])[name].mean_and_deviation
        aim = torch.stack(
            [w * moments[name].mean_and_deviation for w, moments in zip(weights / weights.sum(), seen)]
        ).sum(0)
        scale = torch.where(deviation > 1e-12, aim[1] / deviation.clamp(min=1e-12), 1)
        with torch.no_grad():
            weight, bias = layer.weight.cpu().double(), layer.bias.cpu().double()
            if isinstance(layer, _TRANSPOSED):  # [inputs, outputs of a group, ...]
                groups = layer.groups
                parts = weight.unflatten(0, (groups, -1)) * scale.view(groups, 1, -1, *[1] * (weight.ndim - 2))
                layer.weight.copy_(parts.flatten(0, 1))
            else:
                layer.weight.copy_(weight * scale.view(-1, *[1] * (weight.ndim - 1)))
            layer.bias.copy_((bias - mean) * scale + aim[0])
    return model
