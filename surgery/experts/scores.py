"""Scores of experts: how often the router chooses them, how large weights are."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import SurgeryError, explain
from surgery.experts.mixtures import Mixture, experts_of, mixtures
from surgery.forward import as_batches, call, copy_tensors, in_mode, tensors_in


def norm(model: nn.Module, *, experts: str | None = None) -> dict[str, Tensor]:
    """Return the norm of each expert's weights, by the name of its mixture.

    >>> layer = nn.ModuleDict({"gate": nn.Linear(4, 3), "experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(3))})
    >>> norm(layer)[""].shape
    torch.Size([3])
    """
    all_mixtures = mixtures(model, experts=experts)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise SurgeryError("norms need values, and the model is on the meta device", code="values")
    return {
        mixture.name: torch.stack(
            [
                torch.stack([t.detach().double().square().sum() for t in expert]).sum()
                for expert in experts_of(model, mixture)
            ]
        ).sqrt()
        for mixture in all_mixtures
    }


def frequency(model: nn.Module, batches: Iterable[Any], *, experts: str | None = None) -> dict[str, Tensor]:
    """Count the tokens that each expert gets, by its mixture's name, in shares of 1.

    Where every expert sees every token, and no attribute says how many the router chooses, its share is the mean of its
    probabilities, the softmax of what the router gives.

    Args:
        model: it runs in evaluation mode, on a copy.
        batches: inputs, each as `example` of `surgery.narrow`.
        experts: as for `surgery.experts.mixtures`.

    Raises:
        SurgeryError: if the model does not run on a batch, or if its choices cannot be seen.

    >>> class Layer(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.gate, self.k = nn.Linear(2, 3), 1
    ...         self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    ...     def forward(self, x):
    ...         chosen = self.gate(x).argmax(1)
    ...         return torch.stack([self.experts[i](row) for i, row in zip(chosen.tolist(), x)])
    >>> layer = Layer()
    >>> _ = layer.gate.weight.data.zero_(), layer.gate.bias.data.copy_(torch.tensor([0.0, 2.0, 1.0]))
    >>> frequency(layer, [torch.ones(4, 2)])[""].tolist()
    [0.0, 1.0, 0.0]
    """
    batches = as_batches(batches, "frequency")
    twin = clone(model)
    seen = [_Seen(twin, mixture) for mixture in mixtures(twin, experts=experts)]
    with in_mode(twin, training=False, own_draws=False):
        for number, batch in enumerate(batches):
            with explain(f"{type(model).__name__} does not run on batches[{number}]"):
                call(twin, copy_tensors(batch))
    return {counter.mixture.name: counter.shares() for counter in seen}


class _Seen:
    """The tensors that pass through the modules of one mixture."""

    def __init__(self, model: nn.Module, mixture: Mixture):
        self.mixture = mixture
        zeros = torch.zeros(mixture.size, dtype=torch.float64)
        self.indices, self.rows, self.likely, self.routed = zeros.clone(), zeros.clone(), zeros.clone(), zeros.clone()
        routers = [model.get_submodule(name) for name in dict.fromkeys(module for module, *_ in mixture.router)]
        for module in {module for module, _ in mixture.fused}:
            model.get_submodule(module).register_forward_pre_hook(self._enter, with_kwargs=True)
        for holder in mixture.lists:
            for number, child in enumerate(model.get_submodule(holder).children()):
                child.register_forward_pre_hook(self._count(number), with_kwargs=True)
        routers[0].register_forward_hook(self._leave)

    def _enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Count the numbers of experts that are given to fused ones."""
        numbers = [t for t in tensors_in((args, kwargs)) if t.dtype in (torch.int32, torch.int64) and t.ndim > 1]
        if numbers:
            self.indices += self._tally(numbers[0])

    def _count(self, number: int) -> Any:
        def count(_: nn.Module, args: Any, kwargs: Any) -> None:
            first = tensors_in((args, kwargs))[0]
            self.rows[number] += first.shape[:-1].numel()

        return count

    def _leave(self, _: nn.Module, __: Any, output: Any) -> None:
        """Record what the router gives: experts' numbers, or one number for each expert."""
        outputs = tensors_in(output)
        whole = [t for t in outputs if t.dtype in (torch.int32, torch.int64) and t.shape[-1] == self.mixture.chosen]
        if whole:
            self.routed += self._tally(whole[0])
        scores = [t for t in outputs if t.is_floating_point() and t.ndim and t.shape[-1] == self.mixture.size]
        if scores:
            flat = scores[0].detach().double().cpu().flatten(0, -2) if scores[0].ndim > 1 else scores[0].cpu()[None]
            k = self.mixture.chosen
            self.likely += self._tally(flat.topk(k).indices) if 0 < k <= self.mixture.size else flat.softmax(1).sum(0)

    def _tally(self, indices: Tensor) -> Tensor:
        flat = indices.detach().flatten().cpu()
        return flat[flat < self.mixture.size].bincount(minlength=self.mixture.size).double()

    def shares(self) -> Tensor:
        """Return the shares from the counts nearest to the experts that are not all equal."""
        is_sparse = len(self.rows.unique()) > 1
        for counts in (self.indices, self.rows if is_sparse else 0 * self.rows, self.routed, self.likely):
            if counts.sum():
                return counts / counts.sum()
        raise SurgeryError(
            f"the choices of the router of {self.mixture.name!r} cannot be seen: give scores of your own",
            code="unsupported",
        )
