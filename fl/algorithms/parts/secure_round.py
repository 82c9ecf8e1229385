"""Secure recombination of trained models, between local training and the server's own rule."""

import logging
import random
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from fl.base.rng import Rng
from fl.federation import traffic
from fl.federation.spread import whole
from fl.federation.trained import Trained
from fl.secure import Outcome, exchange
from surgery import Stack
from surgery.recombine import Segment

_log = logging.getLogger("fl")


def recombine(
    trained: Trained, starts: Stack, clients: Sequence[int], pieces: Sequence[Segment], repeats: int, rng: Rng
) -> Trained:
    """What the server receives instead of the trained models: the same pieces, recombined among the clients.

    A client that was dropped in training takes no part. A client that the exchange leaves out keeps its start and gets
    the size 0, like a dropped one; a warning names it. If fewer than two clients are left, or one is
    lost in the upload, all of them are left out.

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
    received = whole(trained.received)
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
    if outcome.excluded:
        lost = "; ".join(f"client {client} is left out ({reason})" for client, reason in outcome.excluded.items())
        _log.warning("warning: round %d: secure recombination: %s", round, lost)
    down, up, peers = (
        sum(sent.values()) / len(clients) for sent in (outcome.from_server, outcome.to_server, outcome.to_peers)
    )
    trained = traffic.add_bytes(trained, down, up - trained.metrics["bytes_up"])  # instead of the bare models
    metrics = {**trained.metrics, "bytes_peers": peers, "secure_seconds": seconds}
    return trained._replace(states=states, sizes=sizes, metrics=metrics, received=states)


def to_bytes(models: Stack, pieces: Sequence[Segment]) -> list[list[bytes]]:
    """The K models of a stack, each as the bytes of its pieces, with one transfer from the device for each piece.

    Args:
        pieces: the state names of each, as `surgery.segments` gives them.

    >>> to_bytes({"a": torch.tensor([1, 2]), "b": torch.tensor([[True], [False]])}, [("a",), ("b",)])[1]
    [b'\\x02\\x00\\x00\\x00\\x00\\x00\\x00\\x00', b'\\x00']
    """
    columns = []
    for names in pieces:
        rows = torch.cat([_rows(models[name]) for name in names], 1).cpu().numpy()
        columns.append([row.tobytes() for row in rows])
    return [list(model) for model in zip(*columns)]


def from_bytes(models: Sequence[Sequence[bytes]], pieces: Sequence[Segment], like: Stack) -> Stack:
    """The inverse, bit for bit: a stack of the given models.

    Args:
        like: a stack with the names, shapes (except for the first axis), dtypes and device of the result.
    """
    result = dict.fromkeys(like)
    for number, names in enumerate(pieces):
        widths = [like[name][0].nbytes for name in names]
        data = bytearray(b"".join(model[number] for model in models))
        device = like[names[0]].device
        rows = torch.frombuffer(data, dtype=torch.uint8).to(device) if data else torch.empty(0, dtype=torch.uint8)
        for name, part in zip(names, rows.view(len(models), sum(widths)).split(widths, 1)):
            tensor = like[name]
            flat = part.clone(memory_format=torch.contiguous_format).view(-1)  # its own memory, aligned for any dtype
            result[name] = flat.view(tensor.dtype).view(len(models), *tensor.shape[1:]).to(tensor.device)
    return result


def _rows(tensor: Tensor) -> Tensor:
    """[K, *S] as bytes [K, bytes of S]."""
    return tensor.detach().reshape(-1).view(torch.uint8).view(len(tensor), -1) if tensor.numel() else _none(tensor)


def _none(tensor: Tensor) -> Tensor:
    return torch.empty(len(tensor), 0, dtype=torch.uint8, device=tensor.device)
