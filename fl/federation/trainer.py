"""Local training as a chain: what trains a cohort, and what wraps it.

Innermost is `Federation.train_cohort`. Around it lie middlewares, which change what clients train, what they send or
whether it arrives: malicious clients, clients that are late. Each is a function from a trainer to a trainer.
"""

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, NamedTuple, Protocol, TypeAlias

from fl.base.rng import Rng
from fl.federation.cohort import Cohort
from fl.federation.local_training import LocalObjective
from fl.federation.update import ClientUpdate


class Training(NamedTuple):
    """A cohort that is about to train.

    Attributes:
        cohort: the clients with the models that they start from.
        objective: what they minimise.
        rng: of the round.
        steps: how many each client makes.
    """

    cohort: Cohort
    objective: LocalObjective
    rng: Rng
    steps: tuple[int, ...]

    def select(self, rows: Sequence[int]) -> "Training":
        """Return the training of some of the clients, by their positions in the cohort."""
        steps = tuple(self.steps[row] for row in rows)
        return Training(self.cohort.select(rows), self.objective.select(rows), self.rng, steps)


Trainer: TypeAlias = Callable[[Training], ClientUpdate]


class Stage(IntEnum):
    """The place of a middleware: a smaller stage is nearer to training."""

    TRAINING = 1
    """It changes what clients learn or send."""
    DIVERGENCE = 2
    """It drops clients whose numbers are no longer finite."""
    ARRIVAL = 3
    """It decides which clients are in time, or there at all."""


class Middleware(Protocol):
    """Something that wraps local training.

    Attributes:
        stage: where it stands among others.
        needs: from what a method must be able to do (`fl.federation.capabilities`) to the flags that ask for it. It may
            be left out, if that is nothing.
        leaves_out: whether it may drop clients of a round. It may be left out, if not.
    """

    @property
    def stage(self) -> Stage:
        """Its place in the order."""

    def __call__(self, fed: Any, train: Trainer) -> Trainer:
        """Return the trainer that takes the place of this one, for a federation's clients."""
