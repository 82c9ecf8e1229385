"""Visits: what a method does at its clients, as functions that run where these are, and what clients keep in between.

In a simulation they run here, for all clients of a round together, and the server holds what each client keeps. For
clients on other machines the same functions run on each node, which keeps its own; the server then has only the number
of each client's version.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fl.base.rng import Rng
from fl.federation.federation import Federation
from fl.federation.own import AtClients, Level, Own, personal
from fl.federation.trained import Trained
from surgery import Stack, State, broadcast
from surgery.transfer import upload

Run: TypeAlias = Callable[..., tuple[Trained, Stack]]
"""(what each client receives, what it kept, the clients, rng) -> (its training, what it keeps from now on). Some also
take `context`, values for each client, and `levels`, whose logits are added up."""

Mine: TypeAlias = Callable[[Stack, Stack, Sequence[int], Rng], Stack]
"""(what each client receives, what it kept, the clients, rng) -> the model that it predicts with."""


class Visit(NamedTuple):
    """One kind of visit of a method.

    Attributes:
        name: by which a node finds it.
        run: what is done. The stacks have a row for each client.
        withheld: the names of trained tensors that never leave the client's machine. (In a simulation the server has
            them, for the model that a stranger would get.)
    """

    name: str
    run: Run
    withheld: Collection[str] = ()


def kept(fed: Federation, start: State) -> Stack:
    """What the server holds of what clients keep, before any of them took part: a row of the start for each client, or
    the numbers of the versions that nodes keep, 0 for none.
    """
    return fed.elsewhere.kept() if fed.elsewhere else broadcast(start, len(fed.clients))


def visit(
    fed: Federation,
    one: Visit,
    received: Stack,
    mine: Stack,
    start: State,
    clients: Sequence[int],
    rng: Rng,
    **more: Any,
) -> tuple[Trained, Stack]:
    """Visit the clients of a round: (their training, what all clients keep). A client that is dropped keeps its state.

    Args:
        received: the model that the server sends to each of the clients [K, ...]; may be empty.
        mine: what all clients keep, as `kept` gave it or the last visit; empty if they keep nothing.
        start: what a client kept that never took part.
        more: context, values for each client [K, ...]; levels (`fl.federation.own.Level`), of which a client gets its
            own models.
    """
    if fed.elsewhere:
        return fed.elsewhere.visit(one, received, mine, start, clients, rng, **more)
    trained, new = one.run(received, rows_of(mine, clients), clients, rng, **more)
    if not mine:
        return trained, mine
    took = [row for row, size in enumerate(trained.sizes) if size]
    index, fresh = _index([clients[row] for row in took], mine), rows_of(new, took)
    return trained, {name: tensor.index_copy(0, index, fresh[name]) for name, tensor in mine.items()}


def is_elsewhere(mine: Stack) -> bool:
    """Whether a server's part holds no states but the numbers of versions that clients on other machines keep."""
    return mine.keys() == {"run", "version"}


def predicting(fed: Federation, make: Mine, received: Stack, mine: Stack, start: State, rng: Rng) -> Own:
    """A model for each client of the population, which it makes of what it receives [clients, ...] and what it keeps;
    see `visit` for these.
    """
    everybody = list(range(len(fed.clients)))
    if fed.elsewhere:
        return Own([Level(AtClients(received, mine, start, rng), torch.tensor(everybody))])
    return personal(make(received, mine, everybody, rng))


def rows_of(models: Stack, rows: Sequence[int]) -> Stack:
    """Some rows of a stack, in that order.

    >>> rows_of({"w": torch.tensor([[0.0], [1.0], [2.0]])}, [2, 0])["w"].flatten()
    tensor([2., 0.])
    """
    if not models:
        return {}
    index = _index(rows, models)
    return {name: tensor.index_select(0, index) for name, tensor in models.items()}


def _index(rows: Sequence[int], models: Stack) -> Tensor:
    return upload(torch.tensor(rows, dtype=torch.int64), next(iter(models.values())).device)
