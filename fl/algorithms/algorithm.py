"""A federated method: a client function and a server function."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from torch import Tensor

from fl.algorithms.server import Server, check_aggregated
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.torch_private import tree_leaves
from fl.federation import Federation, capabilities, traffic
from fl.federation.client_models import ClientModels, personal, predict, select_first_level, share_model
from fl.federation.clients import CLIENTS, Client, Message, check_message, check_update
from fl.federation.cohort import select
from fl.federation.update import ClientUpdate
from surgery import Plan, Stack, broadcast, state

UpdateStep: TypeAlias = Callable[[ClientUpdate, Message, Sequence[int], Rng], ClientUpdate]
"""A function (update, message, clients, rng) -> update: it changes the clients' update before the server gets it."""


class Levels(NamedTuple):
    """The model of each client on each level, see `fl.analysis.structure`.

    Attributes:
        names: the kind of each level: "global" (one model), a number (of cluster models) or "personal" (a model
            for each client).
        models: [levels, clients], the number of the model that each client has on each level; -1 for no model.
        trained: how many levels have been trained so far, counted from the first.
    """

    names: list[str]
    models: list[list[int]]
    trained: int


@dataclass(frozen=True)
class Algorithm:
    """A federated method, as functions.

    They do not depend on where clients are: in this process, on ranks, elsewhere.

    Attributes:
        fed: the federation that the method was made for.
        init: () -> server, before the first round.
        client: (message, client_states, clients, rng) -> update: does the work of all clients of a round at once. It
            gets the message to the clients and their states [K, ...], and treats each client as if it were alone. The
            state that clients send, `update.received`, has the names of the message's "model", or is empty.
        aggregate: (server, clients, update, rng) -> server: the server's rule. A method that adds columns to
            metrics.csv returns (server, metrics). The rule uses only its arguments and does not change the given
            server. `rng.round` counts rounds from 1. The rule must not use `update.client_states` or the server's part
            "clients", since clients on other machines keep these states. That part stays as it is.
        send: (server, clients, rng) -> the message to the clients, see `fl.federation.clients.Message`. None:
            the global model.
        steps: functions that change the update between client and server, in this order.
        models: server -> the models that clients predict with. None: the global model.
        personalize: (models, client_states, clients, rng) -> the models [K, ...] that clients predict with, made from
            the result of `models` and from their client states. None: they predict with the result of `models`.
        keeps: server -> True if the clients of a round need their states. None: if the server has a part "clients".
        sample: (server, rng) -> the clients of a round, for methods that choose them. None: `Federation.sample` samples
            K distinct clients uniformly.
        plan: client -> the plan that makes the client's model from the global model, for methods where a client always
            has the same part; None for other methods.
        levels: server -> the model of each client on each level, for methods that look for clusters of clients; None
            for other methods.
        lacks: the capabilities (`fl.federation.capabilities`) that the method does not have.
        always_aggregates: whether `aggregate` is called even in a round in which no update arrives.
        max_rounds: number of rounds -> (how many of these rounds the method can do, why it cannot do more). None: it
            can do all.
        name: the method's name.
    """

    fed: Federation
    init: Callable[[], Server]
    client: Client
    aggregate: Callable[[Server, Sequence[int], ClientUpdate, Rng], Server | tuple[Server, dict[str, float]]]
    send: Callable[[Server, Sequence[int], Rng], Message] | None = None
    steps: Sequence[UpdateStep] = ()
    models: Callable[[Server], ClientModels] | None = None
    personalize: Callable[[Stack, Stack, Sequence[int], Rng], Stack] | None = None
    keeps: Callable[[Server], bool] | None = None
    sample: Callable[[Server, Rng], list[int]] | None = None
    plan: Callable[[int], Plan] | None = None
    levels: Callable[[Server], Levels] | None = None
    lacks: frozenset[str] = frozenset()
    always_aggregates: bool = False
    max_rounds: Callable[[int], tuple[int, str]] | None = None
    name: str = "this method"

    def check(self, needs: Mapping[str, str]) -> None:
        """Raise FLError if the method lacks a capability that is needed.

        Args:
            needs: for each capability, by its name in `fl.federation.capabilities.CAPABILITIES`, the flags that need
                it.
        """
        capabilities.check(self.name, self.lacks, needs)

    def choose(self, server: Server, rng: Rng) -> list[int]:
        """Return the clients of a round."""
        return self.sample(server, rng) if self.sample else self.fed.sample(rng)

    def round(self, server: Server, clients: Sequence[int], rng: Rng) -> tuple[Server, ClientUpdate]:
        """Do a round: send, get the clients' update, apply the steps, aggregate.

        If no update arrives, the server does not change (except with `always_aggregates`).

        Raises:
            FLError: for a client that there is not, and messages or updates that are not as the rest of the code reads
                them.
        """
        number = len(self.fed.clients)
        if strange := [client for client in clients if not 0 <= client < number]:
            raise FLError(f"a round of client {strange[0]}: there are clients 0 to {number - 1}", code="run")
        message = self.send(server, clients, rng) if self.send else {"model": broadcast(server["global"], len(clients))}
        check_message(message)
        needs_states = self.keeps(server) if self.keeps else CLIENTS in server
        client_states = server[CLIENTS] if needs_states else {}
        update, client_states = self.fed.transport.run(self, message, client_states, clients, rng)
        check_update(update, message)
        update = update._replace(metrics=self._traffic(message, update, clients))
        for step in self.steps:
            update = step(update, message, clients, rng)
        if not any(update.sizes) and not self.always_aggregates:
            return server, update
        server = {**server, CLIENTS: client_states} if needs_states else server
        server, metrics = self.aggregate_clients(server, clients, update, rng)
        if needs_states:
            server = {**server, CLIENTS: server.get(CLIENTS, client_states)}
        return server, update._replace(metrics={**update.metrics, **metrics})

    def aggregate_clients(
        self, server: Server, clients: Sequence[int], update: ClientUpdate, rng: Rng
    ) -> tuple[Server, dict[str, float]]:
        """Call `aggregate`; return the new server and the method's metrics."""
        result = self.aggregate(server, clients, update, rng)
        new_server, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        check_aggregated(self.name, new_server, metrics, server)
        return new_server, metrics

    def client_models(self, server: Server) -> ClientModels:
        """Return the models that clients predict with.

        Clients on other machines personalize these models themselves.
        """
        models = self.models(server) if self.models else share_model(server["global"], len(self.fed.clients))
        if self.personalize and not self.fed.transport.has_data:
            return models._replace(client_states=server.get(CLIENTS, {}))
        all_clients = range(len(self.fed.clients))
        return self._personal(server, models, all_clients) if self.personalize else models

    def predict(self, server: Server, images: Tensor, client: int | None = None) -> Tensor:
        """Return logits [N, classes] for uint8 images: of the global model or a client's."""
        if client is None:
            return self.fed.predict(server["global"], images)
        if not 0 <= client < len(self.fed.clients):
            raise FLError(f"client {client}: there are clients 0 to {len(self.fed.clients) - 1}")
        models = self.models(server) if self.models else share_model(server["global"], len(self.fed.clients))
        if self.personalize:
            models, client = self._personal(server, models, [client]), 0
        return predict(self.fed.predict, models.levels, client, images, models.mean)

    def _personal(self, server: Server, models: ClientModels, clients: Sequence[int]) -> ClientModels:
        """Personalize the models of some clients. Return one row per client."""
        client_states = server.get(CLIENTS, {})
        stack = self.personalize(
            select_first_level(models, clients),
            select(client_states, clients) if client_states else {},
            clients,
            models.rng,
        )
        return personal(stack, len(clients))

    def _traffic(self, message: Message, update: ClientUpdate, clients: Sequence[int]) -> dict[str, float]:
        """Return the traffic of a round, see `fl.federation.traffic`."""
        fed, nbytes = self.fed, {}
        models = fed.models_of(clients)
        for model in models:
            nbytes[id(model)] = nbytes.get(id(model)) or sum(tensor.nbytes for tensor in state(model).values())
        message_tensors = [tensor for name, part in message.items() if name != "levels" for tensor in tree_leaves(part)]
        mean_nbytes = sum(nbytes[id(model)] for model in models) / len(models)
        sent = traffic.nbytes(update.received) if update.sent is None else update.sent
        return traffic.count(update.sizes, mean_nbytes, sum(tensor.nbytes for tensor in message_tensors), sent)
