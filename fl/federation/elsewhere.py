"""Clients whose data lie on other machines: what a federation asks of whoever reaches them."""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from fl.base.rng import Rng
from fl.federation.cohort import Cohort, States
from fl.federation.local_training import LocalTraining
from fl.models.search import Space
from fl.partition import Splits
from surgery import State
from zoo import Spec


class Elsewhere(Protocol):
    """The way to clients elsewhere, see `fl.deploy.remote`.

    Attributes:
        splits: how many samples each client has. The numbers of the samples mean nothing here.
        labels: whether the labels of the data that stand in for the clients' are as frequent as theirs.
    """

    splits: Splits
    labels: bool

    def specs(self, space: Space) -> list[Spec] | None:
        """The architecture of each client by its own budget; None if the settings choose them."""

    def meet(self, population: Any) -> None:
        """The federation is complete: what its clients train, and how, is known from now on."""

    def train(
        self, population: Any, local: LocalTraining, cohort: Cohort, objective: Any, rng: Rng
    ) -> tuple[States, Tensor, Sequence[int]]:
        """The trained states, in the form of the cohort's, the losses [K] and the numbers of samples, 0 for a client
        that sent nothing that can be used: it keeps its start.

        Raises FLError if too few clients answered.
        """

    def kept(self) -> State:
        """What the server holds of what clients keep, before any of them took part: the number of the run, and that of
        each client's version [clients].
        """

    def visit(
        self, one: Any, received: Any, mine: State, start: State, clients: Sequence[int], rng: Rng, **more: Any
    ) -> tuple[Any, State]:
        """See `fl.federation.visit.visit`; `mine` holds the numbers of versions. Raises FLError as `train`."""

    def judge(self, what: str, levels: Sequence[Any], more: Sequence[Any], mean: bool) -> Tensor:
        """What clients' validation data say of levels, see `fl.algorithms.parts.additive.Validation`: float64
        [len(more), clients], not-a-numbers for a client that did not answer.

        Args:
            what: "losses" or "accuracies".
        """

    def recombine(
        self, starts: State, clients: Sequence[int], pieces: Sequence[Sequence[str]], repeats: int, rng: Rng
    ) -> Any:
        """Train the clients from these states, and let them recombine their models in secret before they upload them,
        see `fl.algorithms.parts.secure_round.recombine`.
        """

    def score(self, own: Any) -> dict[str, list[dict[str, float]]]:
        """The scores of each client on its own held-out samples, see `fl.runs.evaluate.score_clients`; not-a-numbers
        for a client that did not answer.

        Args:
            own: what clients predict with, see `fl.federation.own.Own`.
        """
