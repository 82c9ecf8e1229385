"""Aggregation that withstands some malicious clients: an option of every method that averages."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fl.base.errors import FLError
from surgery import Stack, State, Submodel, average, average_submodels, trimmed_mean, trimmed_mean_submodels
from surgery.transfer import upload

RULES = ("mean", "median", "trimmed")


@dataclass(frozen=True)
class Defence:
    """Defences against malicious clients. The default is none."""

    rule: str = "mean"
    """how models are averaged: mean, weighted by samples; median or trimmed, coordinate by coordinate among those who
    have it, without weights (Yin et al., ICML 2018)"""
    trim: float = 0.2
    """trimmed: share of the largest and of the smallest values that is left out, rounded down: 0.2 of four is
    none"""
    clip: float = 0.0
    """longest update of a client, in multiples of the round's median; longer ones are cut to it; 0: none"""

    def check(self) -> None:
        """Raise FLError for values out of range."""
        if self.rule not in RULES:
            raise FLError(f"unknown --defence.rule {self.rule!r}: there are {', '.join(RULES)}")
        if not 0 <= self.trim < 0.5:
            raise FLError(f"--defence.trim is a share of at least 0 and below 0.5, got {self.trim}; or use median")
        if not 0 <= self.clip < math.inf:
            raise FLError(f"--defence.clip is a number of 0 or more, got {self.clip}")

    def unread(self, name: str) -> str:
        """Why an option says nothing beside the others; "" where it does."""
        return f"--defence.rule is {self.rule}: give trimmed" if name == "trim" and self.rule != "trimmed" else ""

    def average(
        self,
        models: Stack,
        weights: Tensor | Sequence[float] | Sequence[Sequence[float]] | None = None,
        fallback: Mapping[str, Tensor] | None = None,
    ) -> State | Stack:
        """`surgery.average` by the rule. Median and trimmed mean take from the weights only who has none: an attacker
        could lie about the others.
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
        if self.rule == "mean":
            return average_submodels(states, plans, fallback=fallback, weights=weights, factors=factors)
        return trimmed_mean_submodels(
            states, plans, fallback=fallback, trim=self._share(), weights=weights, factors=factors
        )

    def _share(self) -> float:
        return 0.5 if self.rule == "median" else self.trim

    @torch.no_grad()
    def clipped(
        self, trained: Stack | list[State], starts: Stack | Sequence[State], sizes: Sequence[int], names: set[str]
    ) -> Stack | list[State]:
        """The trained models with updates no longer than `clip` medians, over the parameters; buffers stay.

        Args:
            sizes: 0 for clients whose update does not count.

        >>> start, end = {"w": torch.zeros(3, 1)}, {"w": torch.tensor([[1.0], [2.0], [50.0]])}
        >>> Defence(clip=2.0).clipped(end, start, [1, 1, 1], {"w"})["w"].flatten()
        tensor([1., 2., 4.])
        """
        stacked = isinstance(trained, dict)
        rows = [(trained, starts)] if stacked else [(_single(a), _single(b)) for a, b in zip(trained, starts)]
        norms = torch.cat([_lengths(after, before, names) for after, before in rows])
        counted = upload(torch.tensor([k for k, size in enumerate(sizes) if size]), norms.device)
        limit = self.clip * norms.index_select(0, counted).median()
        share = torch.where(norms > limit, limit / norms, torch.ones_like(norms))
        if stacked:
            return _shortened(trained, starts, share, names)
        done = [_shortened(after, before, share[k : k + 1], names) for k, (after, before) in enumerate(rows)]
        return [{name: tensor[0] for name, tensor in state.items()} for state in done]


def _single(state: State) -> Stack:
    return {name: tensor[None] for name, tensor in state.items()}


def _lengths(after: Stack, before: Stack, names: set[str]) -> Tensor:
    """The lengths of the updates [K], summed in float64."""
    squares = [(after[n].double() - before[n].double()).flatten(1).square().sum(1) for n in after if n in names]
    return torch.stack(squares).sum(0).sqrt()


def _shortened(after: Stack, before: Stack, share: Tensor, names: set[str]) -> Stack:
    """The stack with its updates multiplied by their shares [K]; a share of 1 leaves a model bit for bit as it is."""
    result = dict(after)
    for name in names & after.keys():
        factor = share.to(after[name].dtype).view(-1, *[1] * (after[name].ndim - 1))
        cut = before[name] + factor * (after[name] - before[name])
        result[name] = torch.where(factor < 1, cut, after[name])
    return result
