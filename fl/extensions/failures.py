"""Let clients fail at random: their updates do not arrive."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch

from fl.algorithms.extension import Extension
from fl.base.rng import Rng
from fl.base.settings import number
from fl.federation import Federation
from fl.federation.divergence import restore
from fl.federation.trainer import Stage, Trainer, Training
from fl.federation.update import ClientUpdate


@dataclass(frozen=True)
class FailureOptions:
    """Clients that fail at random. The default is none."""

    share: Annotated[float, number(float, least=0, below=1)] = 0.0
    """probability that a participant of a round fails: its update does not arrive, and it counts as dropped"""


class Failures(NamedTuple):
    """The middleware of clients that fail in a round, each with the same probability.

    Whether a client fails depends only on the seed, the round and the client, so it is the same with every method and
    after resuming. If a method trains a client twice in a round, both updates are lost. Training outside the round,
    such as fine-tuning before predictions, does not fail.

    Attributes:
        share: the probability of a failure.
        seed: the run's seed.
    """

    share: float
    seed: int

    def __str__(self) -> str:
        return "--failures"  # the name in messages

    @property
    def stage(self) -> Stage:
        """The place among the steps of training."""
        return Stage.ARRIVAL

    @property
    def leaves_out(self) -> bool:
        """True: clients that fail send nothing."""
        return True

    def fails(self, round: int, client: int) -> bool:
        """Return whether a client fails in a round.

        >>> [client for client in range(10) if Failures(0.5, seed=0).fails(1, client)]
        [2, 7, 8, 9]
        """
        return bool(torch.rand((), generator=Rng(self.seed, round).torch("failures", client)) < self.share)

    def __call__(self, fed: Federation, train: Trainer) -> Trainer:
        """Return a trainer that gives failed clients their start back, and size 0."""

        def run(training: Training) -> ClientUpdate:
            update, starts = train(training), training.cohort.states
            if training.rng.seed != self.seed:  # training outside the round, see `Rng.apart`
                return update
            failed = (self.fails(training.rng.round, client) for client in training.cohort.clients)
            sizes = tuple(0 if gone else size for gone, size in zip(failed, update.sizes))
            states, received = (restore(every, starts, sizes) for every in (update.states, update.received))
            return update._replace(sizes=sizes, states=states, received=received)

        return run


def _failing(fed: Federation, config: Any, rng: Rng) -> Federation:
    return replace(fed, training=(*fed.training, Failures(config.extensions["failures"].share, rng.seed)))


EXTENSION = Extension(FailureOptions(), federation=_failing)
