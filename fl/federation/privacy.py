"""Differential privacy of clients towards whoever sees the models that a trusted server makes of theirs.

McMahan et al., "Learning Differentially Private Recurrent Language Models" (ICLR 2018), with a fixed
denominator; the clip that adapts is that of Andrew et al., "Differentially Private Learning with Adaptive Clipping"
(NeurIPS 2021).
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import torch
from torch import Tensor

from fl.base.console import quiet
from fl.base.errors import FLError
from fl.base.plugins import needed
from fl.base.settings import Above0, AtLeast0, Limits, OnlyWith, number, one_of
from surgery import Stack, State
from surgery.transfer import double, upload

_LIBRARY = ("privacy", "dp_accounting", "dp_accounting.rdp")
_ON = OnlyWith("clip", Limits(above=0))
_NOISY = OnlyWith("noise", Limits(above=0))
_ADAPTIVE = OnlyWith("quantile", Limits(above=0))


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
    """of what epsilon is proven: fixed (K clients are drawn, as it is here, and one client is replaced by another) or
    poisson (as papers report it: each client takes part with probability K / n, and one is added or removed; not
    proven for the K clients that are drawn here)"""
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
        """The standard deviations of the noise on the sum of the updates, in clips, and on the number of short ones.

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
        """The private mean of K models, and the clip of the next round.

        To the mean of the starts come the clipped updates, all with weight 1 / K, and noise. What is not a finite
        number in an update counts as 0. Tensors other than those of these names are as in the starts.

        Args:
            clip: of this round, a scalar on the device.
            generator: draws the noise, on the CPU, so that it is the same on every device.

        >>> start, end = {"w": torch.zeros(2, 1)}, {"w": torch.tensor([[1.0], [8.0]])}
        >>> Privacy(clip=2.0, noise=0.0).mean(end, start, torch.tensor(2.0), {"w"}, torch.Generator())
        ({'w': tensor([1.5000])}, tensor(2.))
        """
        steps = {n: torch.nan_to_num(received[n] - starts[n], nan=0.0, posinf=0.0, neginf=0.0) for n in names}
        k = len(next(iter(starts.values())))
        each = [double(step.reshape(k, -1)).square().sum(1) for step in steps.values()]
        lengths = torch.stack(each).sum(0).sqrt()
        shares = torch.where(lengths > clip, clip / lengths, 1.0)
        on_sum, on_count = self.deviations(k)
        mean = {name: tensor[0] for name, tensor in starts.items()}
        for name, step in steps.items():
            clipped = torch.tensordot(shares.to(step.dtype), step, dims=1)
            drawn = upload(torch.randn(clipped.shape, generator=generator, dtype=clipped.dtype), clip.device)
            mean[name] = starts[name].mean(0) + (clipped + on_sum * clip * drawn) / k
        if not self.quantile:
            return mean, clip
        drawn = upload(on_count * torch.randn((), generator=generator), clip.device)
        count = (lengths <= clip).sum() + drawn
        return mean, clip * torch.exp(-self.quantile_lr * (count / k - self.quantile))

    def spent(self, rounds: int, clients: int, participants: int) -> float:
        """The epsilon after so many rounds, by `dp_accounting`, for `delta`; without rounds it is 0.

        With `fixed` accounting a client that is replaced by another changes the sum by two clips at most, so the noise
        counts as half of what it is in clips. If all clients are participants, nothing is gained by drawing them.

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
    with quiet("absl"):  # it names orders of which it makes no use
        return float(accountant.compose(event, rounds).get_epsilon(delta))
