"""What a federated method is: a few plain functions."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from torch import Tensor

from fl.base.rng import Rng
from fl.federation import Federation
from fl.federation.own import Own
from fl.federation.trained import Trained
from fl.federation.visit import Mine, Visit
from surgery import Stack, State, Submodel

Server: TypeAlias = dict[str, State | Stack]
"""What the server keeps from round to round, by name. It is saved and restored as it is, and always has "global"."""


class Levels(NamedTuple):
    """Which model each client has on each level, see `fl.analysis.structure`.

    Attributes:
        names: what each level holds: "global" (one model), a number (of cluster models) or "personal" (a model for each
            client).
        models: the number of each client's model on each level, -1 for none: [levels, clients].
        trained: how many levels have been trained so far, counted from the first.
    """

    names: list[str]
    models: list[list[int]]
    trained: int


class Algorithm(NamedTuple):
    """A federated method.

    Attributes:
        init: () -> server, before the first round.
        round: (server, clients, rng) -> (server, trained): train the clients and apply the server's rule. A
            function of its arguments alone; the given server is not changed. Rounds count from 1 (`rng.round`).
        predict: (server, images, client) -> logits [N, classes] of the deployed model for uint8 images, or of
            the model that one client would use (None: any client).
        sample: (server, rng) -> the clients of a round, for methods that choose them. None: K distinct clients, drawn
            uniformly by `Federation.sample`.
        plan: client -> where its model lies in the global one, for methods whose clients always have the same part of
            it; None for others.
        own: server -> the models behind `predict`, so that all clients can be evaluated in a few passes. None: each
            client is evaluated on its own, through `predict`.
        levels: server -> which client has which model, for methods that look for clusters of clients; None for others.
        visits: what the method does at its clients beside plain training. Rounds call them through
            `fl.federation.visit.visit`; nodes on other machines find them here, by the function's name.
        mine: how a client makes the model that it predicts with, for methods whose clients keep something; `own` calls
            it through `fl.federation.visit.predicting`.
    """

    init: Callable[[], Server]
    round: Callable[[Server, list[int], Rng], tuple[Server, Trained]]
    predict: Callable[[Server, Tensor, int | None], Tensor]
    sample: Callable[[Server, Rng], list[int]] | None = None
    plan: Callable[[int], Submodel] | None = None
    own: Callable[[Server], Own] | None = None
    levels: Callable[[Server], Levels] | None = None
    visits: Sequence[Visit] = ()
    mine: Mine | None = None

    def choose(self, fed: Federation, server: Server, rng: Rng) -> list[int]:
        """The clients of a round."""
        return self.sample(server, rng) if self.sample else fed.sample(rng)
