"""Aggregation that withstands some malicious clients, for every method that averages."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from fl.base.settings import AtLeast0, OnlyWith, number, one_of
from fl.federation.cohort import States, as_before, stacks
from surgery import Stack, State, Submodel, average, average_submodels, trimmed_mean
from surgery.states import stack_size
from surgery.transfer import upload


@dataclass(frozen=True)
class Defence:
    """Defences against malicious clients. The default is none."""

    rule: Annotated[str, one_of("mean", "median", "trimmed")] = "mean"
    """how models are averaged: mean, weighted by samples; median or trimmed, coordinate by coordinate among those who
    have it, without weights (Yin et al., ICML 2018)"""
    trim: Annotated[float, number(float, least=0, below=0.5), OnlyWith("rule", "trimmed")] = 0.2
    """trimmed: fraction trimmed from each end before averaging, rounded down (with 4 clients, 0.2 trims none)"""
    clip: AtLeast0 = 0.0
    """longest update of a client, in multiples of the round's median; longer ones are cut to it; 0: none"""

    def average(
        self,
        models: Stack,
        weights: Tensor | Sequence[float] | Sequence[Sequence[float]] | None = None,
        fallback: Mapping[str, Tensor] | None = None,
    ) -> State | Stack:
        """`surgery.average` by the rule.

        Median and trimmed mean only leave out those whose weight is 0: an attacker could lie about larger weights.
        """
        if self.rule == "mean":
            return average(models, weights=weights, fallback=fallback)
        return trimmed_mean(models, trim=self._share(), weights=weights, fallback=fallback)

    def average_submodels(
        self,
        states: Sequence[State],
        plans: Sequence[Submodel],
        fallback: State,
        weights: Sequence[float],
        factors: Mapping[str, Tensor] | None = None,
    ) -> State:
        """`surgery.average_submodels` by the rule, among the clients that cover an element."""
        trim = None if self.rule == "mean" else self._share()
        return average_submodels(states, plans, weights=weights, factors=factors, fallback=fallback, trim=trim)

    def _share(self) -> float:
        return 0.5 if self.rule == "median" else self.trim

    @torch.no_grad()
    def clipped(self, trained: States, starts: States, sizes: Sequence[int], names: Container[str]) -> States:
        """The trained models, with no update of the parameters longer than `clip` medians. Buffers stay as they are.

        Args:
            sizes: 0 for clients whose update does not count in the median.
            names: of the parameters.

        >>> start, end = {"w": torch.zeros(3, 1)}, {"w": torch.tensor([[1.0], [2.0], [50.0]])}
        >>> Defence(clip=2.0).clipped(end, start, [1, 1, 1], {"w"})["w"].flatten()
        tensor([1., 2., 4.])
        """
        pairs = list(zip(stacks(trained), stacks(starts)))
        norms = torch.cat([_lengths(after, before, names) for after, before in pairs])
        counted = upload(torch.tensor([k for k, size in enumerate(sizes) if size]), norms.device)
        limit = self.clip * norms.index_select(0, counted).median()
        share = torch.where(norms > limit, limit / norms, torch.ones_like(norms))
        shares = share.split([stack_size(after) for after, _ in pairs])
        return as_before(trained, [_shortened(*pair, own, names) for pair, own in zip(pairs, shares)])


def _lengths(after: Stack, before: Stack, names: Container[str]) -> Tensor:
    """The lengths of the updates [K], summed in float64."""
    steps = [after[name].double() - before[name].double() for name in after if name in names]
    return torch.stack([step.reshape(len(step), -1).square().sum(1) for step in steps]).sum(0).sqrt()


def _shortened(after: Stack, before: Stack, share: Tensor, names: Container[str]) -> Stack:
    """The stack with its updates multiplied by their shares [K]; a share of 1 leaves a model unchanged bit for bit."""
    result = dict(after)
    for name in filter(names.__contains__, after):
        factor = share.to(after[name].dtype).view(-1, *[1] * (after[name].ndim - 1))
        cut = before[name] + factor * (after[name] - before[name])
        result[name] = torch.where(factor < 1, cut, after[name])
    return result
