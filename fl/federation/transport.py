"""Transports, which carry a round to clients in this process or elsewhere.

What clients keep for themselves from round to round lies in the server's part CLIENTS: in this process the states of
all clients, a row each; for clients on other machines only what their transport needs to find them again.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from fl.base.rng import Rng
from fl.federation.client_models import ClientModels, Level
from fl.federation.clients import Message, update_states
from fl.federation.cohort import select
from fl.federation.update import ClientUpdate
from fl.models.search import Space
from fl.partition import Splits
from surgery import Stack, State, broadcast
from zoo import Spec


class Transport(Protocol):
    """The way from the server to its clients, wherever they are.

    Attributes:
        has_data: whether the data of the clients are in this process.
        labels: whether it is known how many samples of each class they have.
        splits: how many samples each client has, which says nothing about where these lie; None: the settings deal the
            data out.
    """

    has_data: bool
    labels: bool
    splits: Splits | None

    def specs(self, space: Space) -> list[Spec] | None:
        """Return each client's architecture by its budget; None if settings choose it."""

    def begin(self, fed: Any) -> None:
        """Take the federation, once it and its method have been built."""

    def client_states(self, fed: Any, start: State) -> Stack:
        """Return what the server stores of client states before any of them took part."""

    def run(
        self, algorithm: Any, message: Message, client_states: Stack, clients: Sequence[int], rng: Rng
    ) -> tuple[ClientUpdate, Stack]:
        """Run the method's client function where clients are.

        Returns:
            The update, and what the server then stores of client states.

        Raises:
            FLError: if too few clients answer.
        """

    def recombine(
        self, secure: Any, update: ClientUpdate, message: Message, clients: Sequence[int], rng: Rng
    ) -> ClientUpdate:
        """Recombine clients' models in secret, see `fl.secure`; return the new update."""

    def judge(self, validation: Any, measure: str, levels: Sequence[Level], more: Sequence[Level | None]) -> Tensor:
        """Judge levels on clients' validation data: float64 [len(more), clients].

        It is NaN for clients that did not answer.

        Args:
            validation: `fl.algorithms.parts.additive.Validation`; `measure` is one of its methods.
        """

    def score(self, models: Callable[[], ClientModels], score_local: Callable[[ClientModels], Any]) -> Any:
        """Score every client on its held-out samples; NaN for clients without an answer.

        Args:
            score_local: scores clients whose data are in this process.
        """


class InProcess:
    """All clients are simulated in this process, which has their data."""

    has_data = labels = True
    splits: Splits | None = None

    def specs(self, space: Space) -> None:
        """Return None: the settings choose architectures."""

    def begin(self, fed: Any) -> None:
        """Do nothing."""

    def client_states(self, fed: Any, start: State) -> Stack:
        """Return the start, a row for each client of the population."""
        return broadcast(start, len(fed.clients))

    def run(
        self, algorithm: Any, message: Message, client_states: Stack, clients: Sequence[int], rng: Rng
    ) -> tuple[ClientUpdate, Stack]:
        """Call the method's client function."""
        states = select(client_states, clients) if client_states else {}
        update = algorithm.client(message, states, clients, rng)
        return update, update_states(client_states, clients, update)

    def recombine(
        self, secure: Any, update: ClientUpdate, message: Message, clients: Sequence[int], rng: Rng
    ) -> ClientUpdate:
        """Let simulated clients do it."""
        return secure.simulate(update, message, clients, rng)

    def judge(self, validation: Any, measure: str, levels: Sequence[Level], more: Sequence[Level | None]) -> Tensor:
        """Look at the data."""
        return getattr(validation, measure)(levels, more)

    def score(self, models: Callable[[], ClientModels], score_local: Callable[[ClientModels], Any]) -> Any:
        """Look at the data."""
        return score_local(models())


IN_PROCESS = InProcess()
