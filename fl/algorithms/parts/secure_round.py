"""Secure recombination of trained models, before the server's own rule."""

import logging
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch

from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.federation import Federation, traffic
from fl.federation.clients import Message
from fl.federation.cohort import replace_rows
from fl.federation.update import ClientUpdate
from fl.secure import SERVER, Outcome, exchange, require
from surgery import Stack
from surgery.recombine import Segment
from surgery.transfer import as_bytes

_log = logging.getLogger("fl")


class SecureRecombination(NamedTuple):
    """The step of secure recombination among a round's clients, see `fl.secure`.

    Attributes:
        pieces: the state names of each piece, which travel together.
        repeats: how often the four stages are repeated.
    """

    fed: Federation
    pieces: Sequence[Segment]
    repeats: int

    def __call__(self, update: ClientUpdate, message: Message, clients: Sequence[int], rng: Rng) -> ClientUpdate:
        """Return the update that the server receives: the same pieces, recombined.

        A client that was dropped in training takes no part. A client that the exchange leaves out keeps its start and
        gets the size 0, like a dropped one; a warning names it. If fewer than two clients are left, or one is lost in
        the upload, all of them are left out. Each client's choices come from `rng`, so that the result can be
        repeated.

        Returns:
            The update with the recombined states, on the same device. Its metrics are bytes_peers (what a participant
            sent to other clients), bytes_up, bytes_down, models_up and models_down as they really were, and
            secure_seconds.
        """
        return self.fed.transport.recombine(self, update, message, clients, rng)

    def simulate(self, update: ClientUpdate, message: Message, clients: Sequence[int], rng: Rng) -> ClientUpdate:
        """Recombine the models of clients that are simulated in this process."""
        uploads = zip(clients, to_bytes(update.received, self.pieces), update.sizes)
        models = {client: model for client, model, size in uploads if size}
        outcome = exchange(models, self.repeats, {client: choices(rng, client) for client in models})
        return recombine_received(update, message["model"], clients, self.pieces, outcome, rng.round)


def secure_steps(fed: Federation, pieces: Sequence[Segment], repeats: int, align: bool) -> list[SecureRecombination]:
    """Return the step that recombines models in secret; none for 0 repeats.

    Raises FLError for what cannot be hidden, and without PyNaCl.
    """
    if not repeats:
        return []
    if align:
        raise FLError(
            "--fedmr.align needs the clients' models as they trained them, which --fedmr.secure hides: drop one"
        )
    if fed.participants < 2:
        raise FLError(
            "--fedmr.secure needs two or more participants (--participants, --participation): a single model cannot be "
            "hidden among others"
        )
    if len(pieces) < 2:
        raise FLError(
            "--fedmr.secure needs models of two or more pieces: in one piece they would only change hands; take a "
            "smaller --fedmr.segment-fraction or another --fedmr.unit"
        )
    require()
    return [SecureRecombination(fed, pieces, repeats)]


def choices(rng: Rng, client: int) -> random.Random:
    """Return the source of a simulated client's choices."""
    return random.Random(int(rng.numpy("secure", client).integers(2**63)))


def recombine_received(
    update: ClientUpdate, starts: Stack, clients: Sequence[int], pieces: Sequence[Segment], outcome: Outcome, round: int
) -> ClientUpdate:
    """Return the server's update after an exchange, see `SecureRecombination`."""
    arrived, states = [k for k, client in enumerate(clients) if client in outcome.models], starts
    if arrived:
        states = replace_rows(
            starts, arrived, from_bytes([outcome.models[clients[k]] for k in arrived], pieces, starts)
        )
    sizes = tuple(size if k in arrived else 0 for k, size in enumerate(update.sizes))
    if outcome.excluded:
        _log.warning("warning: round %d: secure recombination: %s", round, "; ".join(outcome.reasons))
    down = sum(size for (sender, _), size in outcome.sent.items() if sender == SERVER) / len(clients)
    up = sum(size for (_, recipient), size in outcome.sent.items() if recipient == SERVER) / len(clients)
    peers = sum(size for ends, size in outcome.sent.items() if SERVER not in ends) / len(clients)
    model = update.metrics["bytes_down"]  # the message was the model
    metrics = traffic.more(update.metrics, model, down, up - update.metrics["bytes_up"])  # instead of the bare models
    metrics |= {"bytes_peers": peers, "secure_seconds": outcome.seconds}
    return update._replace(states=states, sizes=sizes, metrics=metrics, received=states)


def to_bytes(models: Stack, pieces: Sequence[Segment]) -> list[list[bytes]]:
    """Return the models of a stack, each as the bytes of its pieces.

    It takes one transfer from the device a piece.

    Args:
        pieces: the state names of each, as `surgery.segments` gives them.

    >>> to_bytes({"a": torch.tensor([1, 2]), "b": torch.tensor([[True], [False]])}, [("a",), ("b",)])[1]
    [b'\\x02\\x00\\x00\\x00\\x00\\x00\\x00\\x00', b'\\x00']
    """
    columns = []
    for names in pieces:
        flat = [as_bytes(models[name]).view(len(models[name]), models[name][0].nbytes) for name in names]
        rows = torch.cat(flat, 1).cpu().numpy()
        columns.append([row.tobytes() for row in rows])
    return [list(model) for model in zip(*columns)]


def from_bytes(models: Sequence[Sequence[bytes]], pieces: Sequence[Segment], like: Stack) -> Stack:
    """Return the inverse, bit for bit: a stack of the given models.

    Args:
        like: a stack with the names, shapes (except for the first axis), dtypes and device of the result.
    """
    result = dict.fromkeys(like)
    for number, names in enumerate(pieces):
        widths = [like[name][0].nbytes for name in names]
        data = bytearray(b"".join(model[number] for model in models))
        rows = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        rows = rows.to(like[names[0]].device).view(len(models), sum(widths))
        for name, part in zip(names, rows.split(widths, 1)):
            # memory of its own, since a view of the bytes may begin where the dtype may not
            flat = part.clone(memory_format=torch.contiguous_format).view(-1)
            result[name] = flat.view(like[name].dtype).view(len(models), *like[name].shape[1:])
    return result
