"""Aggregation that withstands malicious clients, for every method that averages.

Krum and Multi-Krum: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent" (NeurIPS
2017). Bulyan: El Mhamdi et al., "The Hidden Vulnerability of Distributed Learning in Byzantium" (ICML 2018).

The released code differs from the papers in Krum (n - f - 1 neighbours, lengths that are not squared) and in Bulyan (it
selects n - 2f - 2 models, and means of several in each step); here both are as in the papers. For the last models that
Bulyan selects, Krum has fewer than the 2f + 3 that it asks for: a model then has one neighbour at least, as in Flower.

None of these rules waits for the device.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.extension import Extension, Order
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.settings import AtLeast0, Natural, OnlyWith, check_values, number, one_of
from fl.extensions.trimmed import trimmed_mean
from fl.federation import Federation
from fl.federation.cohort import States, as_before, select, stacks
from surgery import Plan, Stack, State, average, distance
from surgery.states import as_stack, stack_size
from surgery.transfer import double, upload

_LEAST = {"krum": (2, 3), "multikrum": (2, 3), "bulyan": (4, 3)}
"""Rules that choose among whole models, and how many they need: (2, 3) are 2f + 3 of whom f may be malicious."""


@dataclass(frozen=True)
class Defence:
    """Defences against malicious clients. The default is none."""

    rule: Annotated[str, one_of("mean", "median", "trimmed", *_LEAST)] = "mean"
    """how models are averaged: mean, weighted by samples; median or trimmed, coordinate by coordinate among those who
    have it, without weights (Yin et al., ICML 2018); krum (the model nearest to its neighbours) or multikrum (the mean
    of several such models; Blanchard et al., NeurIPS 2017); bulyan (a trimmed mean of models chosen by krum; El Mhamdi
    et al., ICML 2018)"""
    trim: Annotated[float, number(float, least=0, below=0.5), OnlyWith("rule", "trimmed")] = 0.2
    """trimmed: fraction trimmed from each end before averaging, rounded down (with 4 clients, 0.2 trims none)"""
    malicious: Annotated[Natural, OnlyWith("rule", *_LEAST)] = 1
    """krum, multikrum, bulyan: f, how many participants of a round may be malicious; krum and multikrum need 2f + 3
    participants, bulyan 4f + 3"""
    keep: Annotated[Natural, OnlyWith("rule", "multikrum")] = 0
    """multikrum: how many of the n models are averaged, n - f - 2 at most; 0: the most (the released code)"""
    clip: AtLeast0 = 0.0
    """longest update of a client, in multiples of the round's median; longer ones are cut to it; 0: none"""

    def average(
        self,
        models: Stack | Sequence[State],
        weights: Tensor | Sequence[float] | Sequence[Sequence[float]] | None = None,
        fallback: Mapping[str, Tensor] | None = None,
        names: Container[str] = (),
        *,
        plans: Sequence[Plan] | None = None,
        factors: Mapping[str, Tensor] | None = None,
    ) -> State | Stack:
        """Average models by the rule, as `surgery.average` does.

        With plans it compares the clients that cover an element. The other rules only skip models of weight 0: an
        attacker could lie about larger weights.

        Args:
            names: of the parameters by which the distances between models are measured; if the models have none of
                them, by all that they have. (Running variances would outweigh the weights.)

        Raises:
            FLError: for a rule that chooses among whole models, and needs more than there are, or is given parts.
        """
        if self.chooses and plans is not None:
            raise FLError(
                f"--defence.rule {self.rule} chooses among whole models, and these are parts: take median",
                code="unsupported",
            )
        if self.chooses:
            return self._choice(dict(as_stack(models)), weights, names)
        if self.rule == "mean":
            return average(models, plans, weights, fallback, factors=factors)
        return trimmed_mean(models, plans, weights, fallback, trim=self._share(), factors=factors)

    @property
    def chooses(self) -> bool:
        """True if the rule chooses among whole models."""
        return self.rule in _LEAST

    @property
    def needs(self) -> dict[str, str]:
        """The capabilities that a method needs."""
        needs = {}
        if self != Defence():
            needs = {"changed_updates": "--defence", "plain_average": "--defence"}
        if self.clip:
            needs["open_updates"] = "--defence.clip"
        if self.chooses:
            needs = dict.fromkeys((*needs, "whole_average", "open_updates"), f"--defence.rule {self.rule}")
        return needs

    def check_number(self, n: int, owners: str) -> None:
        """Raise FLError if these are too few models for the rule.

        Args:
            owners: whose models they are, for the error.
        """
        if not self.chooses:
            return
        (times, more), f = _LEAST[self.rule], self.malicious
        if n < (least := times * f + more):
            raise FLError(
                f"--defence.rule {self.rule} with --defence.malicious {f} needs {least} models ({times}f + {more}), "
                f"and there are {n} of {owners}: have more --participants, or a smaller --defence.malicious"
            )
        if self.keep > n - f - 2:
            raise FLError(
                f"--defence.keep {self.keep}: of {n} models of {owners} with --defence.malicious {f}, at most "
                f"{n - f - 2} can be kept (n - f - 2)"
            )

    def _choice(self, models: Stack, weights: Any, names: Container[str]) -> State:
        weights = [1] * stack_size(models) if weights is None else torch.as_tensor(weights).tolist()
        if weights and isinstance(weights[0], list):
            raise FLError(
                f"--defence.rule {self.rule} makes one model, and a mean for each cluster is asked for",
                code="unsupported",
            )
        rows = [row for row, weight in enumerate(weights) if weight]
        self.check_number(len(rows), "clients that arrived in this round")
        models = select(models, rows)
        compared = {name: tensor for name, tensor in models.items() if name in names} or models
        if self.rule == "bulyan":
            return bulyan(models, compared, self.malicious)
        keep = 1 if self.rule == "krum" else self.keep or len(rows) - self.malicious - 2
        return multi_krum(models, compared, self.malicious, keep)

    def _share(self) -> float:
        return 0.5 if self.rule == "median" else self.trim

    @torch.no_grad()
    def clip_updates(self, trained: States, starts: States, sizes: Sequence[int], names: Container[str]) -> States:
        """Return the trained models, with no update longer than `clip` medians.

        Buffers stay as they are.

        Args:
            sizes: 0 for updates that do not count in the median.
            names: of the parameters.

        >>> start, end = {"w": torch.zeros(3, 1)}, {"w": torch.tensor([[1.0], [2.0], [50.0]])}
        >>> Defence(clip=2.0).clip_updates(end, start, [1, 1, 1], {"w"})["w"].flatten()
        tensor([1., 2., 4.])
        """
        if not any(sizes):  # no update arrived
            return trained
        pairs = list(zip(stacks(trained), stacks(starts)))
        norms = torch.cat([_lengths(after, before, names) for after, before in pairs])
        counted = upload(torch.tensor([k for k, size in enumerate(sizes) if size]), norms.device)
        limit = self.clip * norms.index_select(0, counted).quantile(0.5)  # `median` takes the lower one of two
        share = torch.where(norms > limit, limit / norms, torch.ones_like(norms))
        shares = share.split([stack_size(after) for after, _ in pairs])
        return as_before(trained, [_shorten(*pair, fraction, names) for pair, fraction in zip(pairs, shares)])


def _lengths(after: Stack, before: Stack, names: Container[str]) -> Tensor:
    """Return the lengths of the updates [K], summed in float64 if possible."""
    steps = [double(after[name]) - double(before[name]) for name in after if name in names]
    return torch.stack([step.reshape(len(step), -1).square().sum(1) for step in steps]).sum(0).sqrt()


def _shorten(after: Stack, before: Stack, share: Tensor, names: Container[str]) -> Stack:
    """Return the stack with its updates multiplied by their shares [K].

    A share of 1 leaves a model unchanged bit for bit.
    """
    result = dict(after)
    for name in filter(names.__contains__, after):
        factor = share.to(after[name].dtype).view(-1, *[1] * (after[name].ndim - 1))
        cut = before[name] + factor * (after[name] - before[name])
        result[name] = torch.where(factor < 1, cut, after[name])
    return result


def squared_distances(models: Stack) -> Tensor:
    """Return squared distances [n, n] between models, in float64 if possible.

    They are infinite on the diagonal.
    """
    squares = double(distance(models, models)).square()
    most = 1e-8 * torch.finfo(squares.dtype).max  # in the place of what is no number: a sum of many is still finite
    far = squares.nan_to_num(most, most).clamp(max=most)
    return far.fill_diagonal_(torch.inf)


def krum_order(distances: Tensor, f: int) -> Tensor:
    """Sort the models by their scores, the best first, stably: int64 [n].

    A model's score is the sum of its squared distances to its n - f - 2 nearest neighbours, or to the nearest one.

    Args:
        distances: as `squared_distances` gives them.
        f: how many may be malicious.

    >>> krum_order(squared_distances({"w": torch.tensor([[9.0], [1.0], [0.0], [2.0], [1.5]])}), f=1).tolist()
    [4, 1, 3, 2, 0]
    """
    neighbours = max(1, len(distances) - f - 2)
    return distances.sort(1).values[:, :neighbours].sum(1).sort(stable=True).indices


def multi_krum(models: Stack, compared: Stack, f: int, m: int) -> State:
    """Return the mean of the m models with the best scores; with m = 1 Krum's.

    Args:
        models: a stack of n models.
        compared: those tensors of the models that their distances are taken of.
    """
    return average(_choose(models, krum_order(squared_distances(compared), f)[:m]))


def bulyan(models: Stack, compared: Stack, f: int) -> State:
    """Choose n - 2f models by Krum, one after another, and trim their mean.

    The mean is of the n - 4f numbers nearest to their median. The second step is made number by number. Integers are
    the maximum over the chosen models.

    Args:
        models, compared: as for `multi_krum`.
    """
    distances, chosen = squared_distances(compared), []
    left = torch.arange(len(distances), device=distances.device)
    while len(left) > 2 * f:
        order = krum_order(distances.index_select(0, left).index_select(1, left), f)
        chosen.append(left[order[:1]])
        left = left[order[1:].sort().values]
    models = _choose(models, torch.cat(chosen))
    result = average(models)
    medians = trimmed_mean(models, trim=0.5)
    for name, tensor in models.items():
        if tensor.is_floating_point():
            nearest = (tensor - medians[name]).abs().topk(stack_size(models) - 2 * f, 0, largest=False).indices
            result[name] = tensor.gather(0, nearest).mean(0)
    return result


def _choose(models: Stack, rows: Tensor) -> Stack:
    return {name: tensor.index_select(0, rows) for name, tensor in models.items()}


def with_defence(fed: Federation, defence: Defence) -> Federation:
    """Return a federation that averages by a rule of defence.

    `with_clipped_updates` clips updates.
    """
    check_values(defence, "defence")
    defence.check_number(fed.participants, "the participants of a round")
    return replace(fed, aggregator=defence)


def with_clipped_updates(algorithm: Algorithm, defence: Defence) -> Algorithm:
    """Return the method with a server that first cuts long updates."""
    algorithm.check(defence.needs)
    fed = algorithm.fed

    def clip(update, message, clients, rng):
        if not update.received:
            return update
        sent = defence.clip_updates(update.received, message["model"], update.sizes, list(fed.trainable))
        return update._replace(received=sent)

    return replace(algorithm, steps=(clip, *algorithm.steps))


def _defend(fed: Federation, config: Any, rng: Rng) -> Federation:
    return with_defence(fed, config.extensions["defence"])


def _clip(algorithm: Algorithm, config: Any, rng: Rng) -> Algorithm:
    return (
        with_clipped_updates(algorithm, config.extensions["defence"])
        if config.extensions["defence"].clip
        else algorithm
    )


EXTENSION = Extension(
    Defence(),
    needs=lambda options: options.needs,
    federation=_defend,
    algorithm=_clip,
    order=Order.RECEIVING,
    simulated=False,
)
