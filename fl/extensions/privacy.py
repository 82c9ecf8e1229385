"""Differential privacy of clients towards whoever sees a trusted server's models.

McMahan et al., "Learning Differentially Private Recurrent Language Models" (ICLR 2018), with a fixed
denominator; the adaptive clip is from Andrew et al., "Differentially Private Learning with Adaptive Clipping"
(NeurIPS 2021).
"""

import math
import secrets
from bisect import bisect_right
from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Annotated

import torch
from torch import Tensor

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.extension import Extension, Order
from fl.base.columns import Column
from fl.base.console import quiet
from fl.base.errors import FLError
from fl.base.plugins import needed
from fl.base.settings import Above0, AtLeast0, Bounds, OnlyWith, check_values, number, one_of
from fl.federation import Federation
from fl.federation.aggregator import WeightedMean
from fl.federation.clients import CLIENTS
from fl.federation.inference import lacks_statistics
from fl.federation.update import ClientUpdate
from surgery import Stack, State, broadcast
from surgery.transfer import double, upload

_LIBRARY = ("privacy", "dp_accounting", "dp_accounting.rdp")
_ON = OnlyWith("clip", Bounds(above=0))
_NOISY = OnlyWith("noise", Bounds(above=0))
_ADAPTIVE = OnlyWith("quantile", Bounds(above=0))


_PART = "privacy"
"""The server's part that holds the clip of the next round."""


@dataclass(frozen=True)
class Privacy:
    """Differential privacy of clients. The default is none."""

    clip: AtLeast0 = 0.0
    """longest update of a client, to which longer ones are cut; with a quantile the first one (Andrew et al.: 0.1); 0:
    no privacy"""
    noise: Annotated[AtLeast0, _ON] = 1.0
    """standard deviation of the noise on the sum of the updates, in multiples of the clip (z); 0: updates are clipped,
    and nothing is private"""
    delta: Annotated[float, number(float, above=0, below=1), _NOISY] = 1e-5
    """probability with which epsilon need not hold; it has to be well below 1 / number of clients"""
    accounting: Annotated[str, one_of("fixed", "poisson"), _NOISY] = "fixed"
    """of what epsilon is proven: fixed (K clients are sampled, as it is here, and one client is replaced by another) or
    poisson (as papers report it: each client takes part with probability K / n, and one is added or removed; not
    proven for the K clients that are sampled here)"""
    epsilon: Annotated[AtLeast0, _NOISY] = 0.0
    """training ends before the round that would spend more than this epsilon; 0: no budget"""
    quantile: Annotated[float, number(float, least=0, below=1), _ON] = 0.0
    """let the clip follow this quantile of the lengths of updates (Andrew et al.: 0.5); 0: it is fixed"""
    quantile_lr: Annotated[Above0, _ADAPTIVE] = 0.2
    """quantile: learning rate of the clip's logarithm (Andrew et al.: 0.2)"""
    quantile_noise: Annotated[AtLeast0, _ADAPTIVE] = 0.0
    """quantile: standard deviation of the noise on the number of updates that are no longer than the clip; 0: a
    twentieth of the participants (Andrew et al.). The noise on the sum grows, so that both together count as `noise`"""

    def deviations(self, participants: int) -> tuple[float, float]:
        """Return the noise's deviations: on updates' sum, and on the number of short ones.

        They are standard deviations; the first is in clips.

        Raises:
            FLError: if the number has so little noise that both cannot count as `noise` together.

        >>> Privacy(clip=1.0, noise=1.0).deviations(100), Privacy(clip=1.0, noise=3.0, quantile=0.5).deviations(50)[1]
        ((1.0, 0.0), 2.5)
        """
        if not self.quantile or not self.noise:
            return self.noise, 0.0
        count = self.quantile_noise or participants / 20
        if 2 * count <= self.noise:
            raise FLError(
                f"--privacy.noise {self.noise} is not reached with noise of {count} on the number of short updates: "
                f"give a --privacy.quantile-noise above {self.noise / 2}"
            )
        return (self.noise**-2 - (2 * count) ** -2) ** -0.5, count

    @torch.no_grad()
    def mean(
        self, received: Stack, starts: Stack, clip: Tensor, names: Collection[str], generator: torch.Generator
    ) -> tuple[State, Tensor]:
        """Return the private mean of K models, and the clip of the next round.

        To the mean of the starts come the clipped updates, all with weight 1 / K, and noise. What is not a finite
        number in an update counts as 0. Tensors with other names are as in the starts.

        Args:
            clip: of this round, a scalar on the device.
            generator: draws the noise, on the CPU, so that it is the same on every device.

        >>> start, end = {"w": torch.zeros(2, 1)}, {"w": torch.tensor([[1.0], [8.0]])}
        >>> Privacy(clip=2.0, noise=0.0).mean(end, start, torch.tensor(2.0), {"w"}, torch.Generator())
        ({'w': tensor([1.5000])}, tensor(2.))
        """
        steps = {n: torch.nan_to_num(received[n] - starts[n], nan=0.0, posinf=0.0, neginf=0.0) for n in names}
        k = len(next(iter(starts.values())))
        squares = [double(step.reshape(k, -1)).square().sum(1) for step in steps.values()]
        lengths = torch.stack(squares).sum(0).sqrt()
        shares = torch.where(lengths > clip, clip / lengths, 1.0)
        on_sum, on_count = self.deviations(k)
        mean = {name: tensor[0] for name, tensor in starts.items()}
        for name, step in steps.items():
            clipped = torch.tensordot(shares.to(step.dtype), step, dims=1)
            noise = upload(torch.randn(clipped.shape, generator=generator, dtype=clipped.dtype), clip.device)
            mean[name] = starts[name].mean(0) + (clipped + on_sum * clip * noise) / k
        if not self.quantile:
            return mean, clip
        noise = upload(on_count * torch.randn((), generator=generator), clip.device)
        count = (lengths <= clip).sum() + noise
        return mean, clip * torch.exp(-self.quantile_lr * (count / k - self.quantile))

    def spent(self, rounds: int, clients: int, participants: int) -> float:
        """Return the epsilon after some rounds, by `dp_accounting`, for `delta`.

        Without rounds it is 0. With `fixed` accounting a client that is replaced by another changes the sum by two
        clips at most, so the noise counts as half of what it is in clips. If all clients are participants, nothing is
        gained by drawing them.

        Raises:
            FLError: without the package.
        """
        return _spent(self.noise, self.delta, self.accounting, rounds, clients, participants) if rounds else 0.0


@lru_cache(maxsize=4096)
def _spent(noise: float, delta: float, accounting: str, rounds: int, clients: int, participants: int) -> float:
    dp = needed("--privacy.noise", *_LIBRARY)
    if accounting == "fixed":
        relation = dp.NeighboringRelation.REPLACE_ONE
        event = dp.SampledWithoutReplacementDpEvent(clients, participants, dp.GaussianDpEvent(noise / 2))
    else:
        relation = dp.NeighboringRelation.ADD_OR_REMOVE_ONE
        event = dp.PoissonSampledDpEvent(participants / clients, dp.GaussianDpEvent(noise))
    accountant = dp.rdp.RdpAccountant(neighboring_relation=relation)
    with quiet("absl"):  # it logs orders that it does not use
        return float(accountant.compose(event, rounds).get_epsilon(delta))


def with_privacy(algorithm: Algorithm, privacy: Privacy) -> Algorithm:
    """Return the method with a server that sees only a private mean of updates.

    It sees this K times, in the place of the K models, with equal weights: whatever it makes of it is as private. See
    `Privacy.mean`. A client that is dropped counts as one that has not moved. Rounds report
    `epsilon`, unless there is no noise, and `update_clip`.

    In a simulation the noise is a function of the run's seed, as all is that is random; with clients on other machines,
    who know the seed and may know who takes part, noise comes from the system, and epsilon holds for clients who take
    part in every round.

    Raises:
        FLError: for a federation or a method that this does not make private.
    """
    check_values(privacy, "privacy")
    fed = algorithm.fed
    _check(algorithm, privacy)

    def affordable(rounds):
        if not (privacy.noise and privacy.epsilon):
            return rounds, ""
        number = bisect_right(range(1, rounds + 1), privacy.epsilon, key=partial(spent, fed, privacy))
        return number, f"round {number + 1} would spend more than --privacy.epsilon {privacy.epsilon}"

    def init():
        privacy.deviations(fed.participants)
        if privacy.noise and not affordable(1)[0]:
            raise FLError(
                f"--privacy.epsilon {privacy.epsilon} is less than the first round spends "
                f"({spent(fed, privacy, 1):.2f}): take more --privacy.noise, more --clients, or fewer --participants"
            )
        return {**algorithm.init(), _PART: {"clip": torch.tensor(privacy.clip, device=fed.data.device)}}

    def aggregate(server, clients, update, rng):
        k, device = len(clients), fed.data.device
        starts = algorithm.send(server, clients, rng)["model"] if algorithm.send else broadcast(server["global"], k)
        if starts.keys() != update.received.keys() or k != fed.participants:
            raise FLError(
                "--privacy.clip is for methods whose K clients send all of the model, and nothing else",
                code="unsupported",
            )
        generator = (
            torch.Generator().manual_seed(secrets.randbits(63)) if not fed.transport.has_data else rng.torch("privacy")
        )
        mean, clip = privacy.mean(update.received, starts, server[_PART]["clip"], list(fed.trainable), generator)
        models = broadcast(mean, k)
        seen = ClientUpdate(models, torch.zeros(k, device=device), (1,) * k, models)
        public = {name: part for name, part in server.items() if name not in (_PART, CLIENTS)}
        after, metrics = algorithm.aggregate_clients(public, clients, seen, rng)
        metrics = {**metrics, "update_clip": server[_PART]["clip"].item()}
        if privacy.noise:
            metrics["epsilon"] = spent(fed, privacy, rng.round)
        return {**after, _PART: {"clip": clip}}, metrics

    return replace(
        algorithm,
        init=init,
        aggregate=aggregate,
        always_aggregates=True,  # which hides who did not send anything
        max_rounds=affordable,
    )


def spent(fed: Federation, privacy: Privacy, rounds: int) -> float:
    """Compute the epsilon that a number of rounds spends."""
    return privacy.spent(rounds, len(fed.clients) if fed.transport.has_data else fed.participants, fed.participants)


def _check(algorithm: Algorithm, privacy: Privacy) -> None:
    """Raise FLError if anything would see more of clients than the private mean."""
    algorithm.check(_needs(privacy))
    fed = algorithm.fed
    if fed.aggregator != WeightedMean():
        raise FLError(
            "--privacy.clip bounds what one client changes, and with --defence one also changes how others count: "
            "leave one of the two out"
        )
    if privacy.noise and privacy.delta >= 1 / len(fed.clients):
        raise FLError(
            f"--privacy.delta {privacy.delta:g} of {len(fed.clients):,} clients says nothing, since publishing one "
            "client's data in full would meet it: take one well below 1 / clients"
        )
    if algorithm.sample:
        raise FLError(
            "--privacy.clip counts on clients that are sampled uniformly: leave --presence out if you set it, or take "
            "a method that samples so, such as fedavg",
            code="unsupported",
        )
    if algorithm.steps or algorithm.plan or algorithm.levels:
        raise FLError(
            "--privacy.clip is for methods that only average whole models of sampled clients: take fedavg",
            code="unsupported",
        )
    if buffers := [name for name in fed.initial() if name not in dict(fed.model.named_parameters())]:
        raise FLError(
            f"--privacy.clip is for parameters, and {buffers[0]} is a buffer, which is averaged without noise "
            f"({len(buffers)} such): take --norm group, layer or none, or a model without",
            code="unsupported",
        )
    if lacks_statistics(fed.model, {}):
        raise FLError(
            "--privacy.clip: static batch norms look at all clients' data: take --norm group, layer or none",
            code="unsupported",
        )


def _needs(options: Privacy) -> dict[str, str]:
    return {"mean_only": "--privacy.clip"} if options.clip else {}


EXTENSION = Extension(
    Privacy(),
    needs=_needs,
    algorithm=lambda algorithm, config, rng: with_privacy(algorithm, config.extensions["privacy"]),
    order=Order.PROTECTING,
    simulated=False,
    columns={
        "update_clip": Column(digits=3, label="longest update of a client", limits=(0, math.inf)),
        "epsilon": Column(heading="epsilon", limits=(0, math.inf)),
    },
)
