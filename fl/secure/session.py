"""One round of secure recombination, from trained models to recombined ones."""

import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fl.base.errors import FLError
from fl.secure.client import Client
from fl.secure.faults import Fault
from fl.secure.network import Network
from fl.secure.server import Server
from fl.secure.wire import SERVER


class Outcome(NamedTuple):
    """The result of a round.

    Attributes:
        models: the recombined model that each client uploaded, piece by piece; together they are the trained models of
            exactly these clients, if they were honest. Empty if fewer than two were left.
        excluded: the other clients, and why each is missing.
        faults: what went wrong on the way, whether or not it could be repaired.
        attempts: how often the exchange began.
        to_peers, to_server: bytes that each client sent.
        from_server: bytes that the server sent to each client.
        seconds: how long it took, with all parties one after another.
    """

    models: dict[int, list[bytes]]
    excluded: dict[int, str]
    faults: list[Fault]
    attempts: int
    to_peers: dict[int, int]
    to_server: dict[int, int]
    from_server: dict[int, int]
    seconds: float


def exchange(
    models: Mapping[int, Sequence[bytes]],
    repeats: int = 1,
    choices: Mapping[int, random.Random] | None = None,
    network: Network | None = None,
) -> Outcome:
    """Recombine the models of clients securely.

    Args:
        models: each client's trained model, by its address, in pieces that have the same lengths for all clients.
        repeats: how often the four stages are repeated.
        choices: the source of each client's choices; None: the operating system for all.
        network: the carrier of the messages; None: one without faults.

    Raises:
        FLError: without PyNaCl, without models, for impossible addresses, for fewer than two pieces or one repeat, and
            for pieces of different lengths.

    >>> trained = {client: [b"first of %d" % client, b"second of %d" % client] for client in (1, 2, 3)}
    >>> outcome = exchange(trained, repeats=2)
    >>> sorted(first for first, _ in outcome.models.values())
    [b'first of 1', b'first of 2', b'first of 3']
    >>> outcome.excluded, outcome.faults
    ({}, [])
    """
    if not models:
        raise FLError("there is no model to exchange: give those of two or more clients")
    for address in models:
        if not 0 <= address < SERVER:
            raise FLError(f"clients' addresses are numbers from 0 to {SERVER - 1}, got {address}")
    shapes = {tuple(map(len, pieces)) for pieces in models.values()}
    if len(shapes) != 1:
        raise FLError(
            f"models of one architecture are exchanged: got pieces of {len(shapes)} different sets of lengths"
        )
    (lengths,) = shapes
    if len(lengths) < 2:
        raise FLError("secure recombination needs two or more pieces: a model in one piece would only change hands")
    if repeats < 1:
        raise FLError(f"secure recombination takes 1 repeat or more, got {repeats}")
    started = time.perf_counter()
    network, choices = network or Network(), choices or {}
    server = Server(list(lengths), repeats)
    clients = {a: Client(a, pieces, server.public, choices.get(a)) for a, pieces in models.items()}
    network.run(server, clients)
    return outcome_of(server, list(clients), network.sent, time.perf_counter() - started)


def outcome_of(server: Server, clients: Sequence[int], sent: Counter[tuple[int, int]], seconds: float) -> Outcome:
    """The result of a round that is over.

    Args:
        sent: bytes by (sender, recipient).
    """
    to_peers = dict.fromkeys(clients, 0)
    for (sender, recipient), size in sent.items():
        if SERVER not in (sender, recipient):
            to_peers[sender] += size
    return Outcome(
        server.models,
        server.excluded,
        server.faults,
        server.attempts,
        to_peers,
        {a: sent[a, SERVER] for a in clients},
        {a: sent[SERVER, a] for a in clients},
        seconds,
    )
