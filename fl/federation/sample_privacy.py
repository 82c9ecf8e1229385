"""Differential privacy of a client's samples towards whoever sees what the client sends, the server included.

Abadi et al., "Deep Learning with Differential Privacy" (CCS 2016): `fl.engine.clipping` makes the steps, this says what
they spend.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, sqrt
from typing import Annotated

from fl.base.console import quiet
from fl.base.errors import FLError
from fl.base.settings import AtLeast0, Limits, OnlyWith, number, one_of
from fl.engine.clipping import SampleClip

_ON = OnlyWith("clip", Limits(above=0))
_NOISY = OnlyWith("noise", Limits(above=0))


@dataclass(frozen=True)
class SamplePrivacy:
    """Differential privacy of single samples (DP-SGD). The default is none."""

    clip: AtLeast0 = 0.0
    """largest norm of one sample's gradient, to which larger ones are cut (Abadi et al. on MNIST: 4); 0: no privacy"""
    noise: Annotated[AtLeast0, _ON] = 1.0
    """standard deviation of the noise on the sum of a batch's gradients, in multiples of the clip; 0: gradients are
    clipped, and nothing is private"""
    delta: Annotated[float, number(float, above=0, below=1), _NOISY] = 1e-5
    """probability with which epsilon need not hold; it has to be well below 1 / number of a client's samples"""
    accounting: Annotated[str, one_of("passes", "poisson"), _NOISY] = "passes"
    """of what epsilon is proven: passes (shuffled ones of fixed batches, as it is here, and one sample is replaced by
    another) or poisson (as papers report it: each sample is in a batch with probability batch size / samples, and one
    is added or removed; not proven for the passes that are made here)"""

    @property
    def of_a_step(self) -> SampleClip | None:
        """How steps clip; None if they do not."""
        return SampleClip(self.clip, self.noise) if self.clip else None

    def spent(self, passes: Sequence[int], samples: Sequence[int], size: int, last: str) -> float:
        """The largest epsilon of the clients, by `dp_accounting`, for `delta`; without passes it is 0.

        With `passes`, nothing is gained by drawing batches. A sample that is replaced by another changes the sum of the
        batches that it is in, by two clips each time that it is there, and no others; so all of its steps are one
        Gaussian mechanism, whatever the order of the samples (Dong et al., "Gaussian Differential Privacy", corollary
        3.3: squares add up).

        Args:
            passes: of each client over its samples, so far.
            samples: how many each has.
            size, last: of the batches, see `fl.engine.batches`.

        Raises:
            FLError: without the package.

        >>> SamplePrivacy(clip=1.0, noise=20.0).spent([0], [10], 5, "partial")
        0.0
        """
        if not any(passes):
            return 0.0
        if self.accounting == "passes":
            steps = max(n * most_in_a_pass(count, size, last) for n, count in zip(passes, samples))
            return _of_passes(self.noise, self.delta, steps)
        most: dict[int, int] = {}
        for n, count in zip(passes, samples):
            most[count] = max(n, most.get(count, 0))
        made = [(min(1.0, size / count), n * ceil(count / size)) for count, n in most.items() if n]
        return max(_of_poisson(self.noise, self.delta, share, steps) for share, steps in made)


def most_in_a_pass(samples: int, size: int, last: str) -> int:
    """How much one sample counts in a pass at most: the sum over the batches of (how often it is in the batch)^2.

    Where the last batch is filled up, some samples are in two batches; those of a client with fewer samples than a
    batch takes are several times in the one there is.

    >>> [most_in_a_pass(n, 10, "filled") for n in (20, 21, 10, 4)], most_in_a_pass(4, 10, "partial")
    ([1, 2, 1, 9], 1)
    """
    if last == "partial" or samples % size == 0:
        return 1
    return 2 if samples > size else ceil(size / samples) ** 2


@lru_cache(maxsize=4096)
def _of_passes(noise: float, delta: float, steps: int) -> float:
    return float(_library().get_epsilon_gaussian(noise / (2 * sqrt(steps)), delta))


@lru_cache(maxsize=4096)
def _of_poisson(noise: float, delta: float, share: float, steps: int) -> float:
    dp = _library()
    event = dp.PoissonSampledDpEvent(share, dp.GaussianDpEvent(noise))
    with quiet("absl"):  # it names orders of which it makes no use
        return float(dp.rdp.RdpAccountant().compose(event, steps).get_epsilon(delta))


def _library():
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError:
        raise FLError(
            "--sample-privacy.noise needs a package that is missing: pip install 'layer-surgery[privacy]'"
        ) from None
    return dp_accounting
