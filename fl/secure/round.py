"""Secure recombination of what a round has trained, between training and the server's own rule."""

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
    """What the server receives in place of the trained models: the same pieces, recombined among the clients.

    A client that was dropped in training takes no part. One that the exchange leaves out keeps its start and counts
    as 0, like a dropped one; a warning names it and every fault. If fewer than two are left, that is all of them.

    Args:
        trained: of a stack, with its sizes and metrics, as `Federation.train` gives it.
        starts: what the clients trained from.
        pieces: what travels together, the state names of each.
        repeats: how often the four stages are gone through.
        rng: the choices of each client follow from it, so the result is the same again.

    Returns:
        Trained: the states on the device where they were; in the metrics bytes_peers (what a participant sent to other
        clients, in bytes), bytes_up and bytes_down, models_up and models_down as it really was, and secure_seconds.
    """
    began = time.perf_counter()
    models = {
        client: model for client, model, size in zip(clients, to_bytes(trained.received, pieces), trained.sizes) if size
    }
    choices = {client: random.Random(int(rng.numpy("secure", client).integers(2**63))) for client in models}
    outcome = exchange(models, repeats, choices)
    kept = [k for k, client in enumerate(clients) if client in outcome.models]
    states = {name: start.clone() for name, start in starts.items()}
    if kept:
        opened = from_bytes([outcome.models[clients[k]] for k in kept], pieces, trained.received)
        rows = torch.tensor(kept, device=trained.loss.device)
        for name, tensor in opened.items():
            states[name].index_copy_(0, rows, tensor)
    sizes = tuple(size if k in kept else 0 for k, size in enumerate(trained.sizes))
    _warn(outcome, rng.round)
    down, up, peers = (
        sum(sent.values()) / len(clients) for sent in (outcome.from_server, outcome.to_server, outcome.to_peers)
    )
    trained = traffic.add_bytes(trained, down, up - trained.metrics["bytes_up"])  # in the place of the bare models
    metrics = {**trained.metrics, "bytes_peers": peers, "secure_seconds": time.perf_counter() - began}
    return trained._replace(states=states, sizes=sizes, metrics=metrics, received=states)


def _warn(outcome: Outcome, round: int) -> None:
    """One warning that names everything that went wrong; none if nothing did."""
    lost = [f"client {client} is left out ({reason})" for client, reason in outcome.excluded.items()]
    faults = [str(fault) for fault in outcome.faults]
    if len(faults) > _SHOWN:
        faults[_SHOWN:] = [f"and {len(faults) - _SHOWN} more"]
    if lost or faults:
        _log.warning("warning: round %d: secure recombination: %s", round, "; ".join(lost + faults))
