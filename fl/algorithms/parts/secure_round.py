"""Secure recombination of trained models, between local training and the server's own rule."""

import logging
import random
import time
from collections.abc import Sequence

import torch

from fl.base.rng import Rng
from fl.federation import traffic
from fl.federation.trained import Trained
from fl.secure.pieces import from_bytes, to_bytes
from fl.secure.session import Outcome, exchange
from surgery import Stack
from surgery.recombine import Segment

_log = logging.getLogger("fl")

_SHOWN = 10  # faults in a warning


def recombine(
    trained: Trained, starts: Stack, clients: Sequence[int], pieces: Sequence[Segment], repeats: int, rng: Rng
) -> Trained:
    """What the server receives instead of the trained models: the same pieces, recombined among the clients.

    A client that was dropped in training takes no part. A client that the exchange leaves out keeps its start and gets
    the size 0, like a dropped one; a warning names it and every fault. If fewer than two clients are left, all of them
    are left out.

    Args:
        trained: a stack's training, as `Federation.train` returns it.
        starts: the models that the clients trained from.
        pieces: the state names of each piece, which travel together.
        repeats: how often the four stages are repeated.
        rng: each client's choices are drawn from it, so that the result can be repeated.

    Returns:
        Trained with the recombined states, on the same device. Its metrics are bytes_peers (what a participant sent to
        other clients), bytes_up, bytes_down, models_up and models_down as they really were, and secure_seconds.
    """
    began = time.perf_counter()
    received = trained.received
    models = {client: model for client, model, size in zip(clients, to_bytes(received, pieces), trained.sizes) if size}
    outcome = exchange(models, repeats, {client: choices(rng, client) for client in models})
    return recombined(trained, starts, clients, pieces, outcome, rng.round, time.perf_counter() - began)


def choices(rng: Rng, client: int) -> random.Random:
    """The source of a simulated client's choices."""
    return random.Random(int(rng.numpy("secure", client).integers(2**63)))


def recombined(
    trained: Trained,
    starts: Stack,
    clients: Sequence[int],
    pieces: Sequence[Segment],
    outcome: Outcome,
    round: int,
    seconds: float,
) -> Trained:
    """What the server receives by an exchange that is over, see `recombine`."""
    kept = [k for k, client in enumerate(clients) if client in outcome.models]
    states = {name: start.clone() for name, start in starts.items()}
    if kept:
        opened = from_bytes([outcome.models[clients[k]] for k in kept], pieces, starts)
        rows = torch.tensor(kept, device=trained.loss.device)
        for name, tensor in opened.items():
            states[name].index_copy_(0, rows, tensor)
    sizes = tuple(size if k in kept else 0 for k, size in enumerate(trained.sizes))
    _warn(outcome, round)
    down, up, peers = (
        sum(sent.values()) / len(clients) for sent in (outcome.from_server, outcome.to_server, outcome.to_peers)
    )
    trained = traffic.add_bytes(trained, down, up - trained.metrics["bytes_up"])  # instead of the bare models
    metrics = {**trained.metrics, "bytes_peers": peers, "secure_seconds": seconds}
    return trained._replace(states=states, sizes=sizes, metrics=metrics, received=states)


def _warn(outcome: Outcome, round: int) -> None:
    """Log one warning that names everything that went wrong, if anything did."""
    lost = [f"client {client} is left out ({reason})" for client, reason in outcome.excluded.items()]
    faults = [str(fault) for fault in outcome.faults]
    if len(faults) > _SHOWN:
        faults[_SHOWN:] = [f"and {len(faults) - _SHOWN} more"]
    if lost or faults:
        _log.warning("warning: round %d: secure recombination: %s", round, "; ".join(lost + faults))
