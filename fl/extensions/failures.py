"""Clients that fail at random: what they have trained in a round does not arrive."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, NamedTuple

import torch

from fl.algorithms.extension import Extension
from fl.base.rng import Rng
from fl.base.settings import number
from fl.federation import Federation
from fl.federation.divergence import restored
from fl.federation.trainer import Stage, Trainer, Training
from fl.federation.update import ClientUpdate


@dataclass(frozen=True)
class FailureOptions:
    """Clients that fail at random. The default is none."""

    share: Annotated[float, number(float, least=0, below=1)] = 0.0
    """probability with which each participant of a round fails: its update does not arrive, and counts as dropped"""


class Failures(NamedTuple):
    """The middleware of clients that fail in a round, each with the same probability.

    Who fails is drawn from the seed, the round and the client, so that it is the same with every method and on
    resuming. A method that trains a client twice in a round loses both. What is trained apart from the clients' round,
    such as the models that clients fine-tune to predict with, does not fail.

    Attributes:
        share: the probability.
        seed: the run's.
    """

    share: float
    seed: int

    def __str__(self) -> str:
        return "--failures"  # in messages

    @property
    def stage(self) -> Stage:
        """Where it stands."""
        return Stage.ARRIVAL

    @property
    def leaves_out(self) -> bool:
        """Clients that fail send nothing."""
        return True

    def fails(self, round: int, client: int) -> bool:
        """Draw whether a client fails in a round.

        >>> [client for client in range(10) if Failures(0.5, seed=0).fails(1, client)]
        [2, 7, 8, 9]
        """
        return bool(torch.rand((), generator=Rng(self.seed, round).torch("failures", client)) < self.share)

    def __call__(self, fed: Federation, train: Trainer) -> Trainer:
        """Give clients that fail their start back, and the size 0."""

        def run(training: Training) -> ClientUpdate:
            update, starts = train(training), training.cohort.states
            if training.rng.seed != self.seed:  # apart from the round, see `Rng.apart`
                return update
            failed = (self.fails(training.rng.round, client) for client in training.cohort.clients)
            sizes = tuple(0 if gone else size for gone, size in zip(failed, update.sizes))
            states, received = (restored(every, starts, sizes) for every in (update.states, update.received))
            return update._replace(sizes=sizes, states=states, received=received)

        return run


def _failing(fed: Federation, config: Any, rng: Rng) -> Federation:
    return replace(fed, training=(*fed.training, Failures(config.extensions["failures"].share, rng.seed)))


EXTENSION = Extension(FailureOptions(), federation=_failing)
