"""Secure recombination among nodes: the server passes on what it cannot read."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl.algorithms.parts.secure_round import SecureRecombination, recombine_received
from fl.base.rng import Rng
from fl.extensions.flower.messages import InvalidMessage, NodeMessage, are_counts, fields
from fl.federation.divergence import finite_rows, restore
from fl.federation.update import ClientUpdate
from fl.secure import Envelope, Server
from fl.secure.boxes import LOCKED_EXTRA, SEALED_EXTRA
from fl.secure.exchange import INTERRUPTED
from surgery import Stack

_KEY = 32  # bytes of a public key


class SecretExchange:
    """The server's side of one round.

    Args:
        step: which pieces, and how often they are exchanged.
        starts: the models that the clients train from.

    Attributes:
        keys: the public key of each client that has trained.
    """

    def __init__(self, step: SecureRecombination, starts: Stack) -> None:
        self._step, self._starts = step, starts
        self.keys: dict[int, bytes] = {}
        self._lengths = [sum(starts[name][0].nbytes for name in names) for names in step.pieces]
        self._server = Server(self._lengths, step.repeats)

    @property
    def invitation(self) -> dict[str, Any]:
        """The part of the requests for training about the exchange that follows."""
        pieces = [list(names) for names in self._step.pieces]
        return {"pieces": pieces, "server": self._server.public.hex(), "repeats": self._step.repeats}

    def recombine(self, remote: Any, update: ClientUpdate, clients: Sequence[int], rng: Rng) -> ClientUpdate:
        """See `fl.federation.transport.Transport.recombine`.

        Args:
            remote: `fl.extensions.flower.remote.Remote`, which carries the requests.
        """
        longest = max(self._lengths) + SEALED_EXTRA + LOCKED_EXTRA
        limit = len(clients) * len(self._lengths) * longest

        def carry(phase: int, waiting: dict[int, list[bytes]]) -> dict[int, list[Envelope]]:
            to = list(waiting)
            headers = [{**remote.header("exchange", client, rng), "phase": phase} for client in to]
            requests = [NodeMessage(header, as_tensors(waiting[client])) for header, client in zip(headers, to)]
            label = f"round {rng.round}, secure recombination"
            came = remote.nodes.exchange(to, requests, limit, lambda _, answer: _envelopes(answer), label)
            return {to[k]: envelopes for k, envelopes in came.items()}

        outcome = self._server.run(self.keys, carry)
        interrupted = list(outcome.excluded.values()).count(INTERRUPTED)  # they were there until another one was lost
        left, did = len(outcome.models) or interrupted, "took part in secure recombination to its end"
        remote.nodes.require_quorum(left, len(clients), did, rng.round, outcome.reasons)
        new = recombine_received(update, self._starts, clients, self._step.pieces, outcome, rng.round)
        # It is not known whose piece is infinite or not a number: the model that contains it is not used.
        fine = finite_rows(new.states, self._starts).tolist()
        states = restore(new.states, self._starts, fine)
        sizes = tuple(size if ok else 0 for size, ok in zip(new.sizes, fine))
        return new._replace(states=states, received=states, sizes=sizes)


def take_key(tensors: dict[str, Tensor]) -> bytes:
    """Take the public key out of an answer's tensors; InvalidMessage without one."""
    key = tensors.pop("public", torch.empty(0))
    if key.dtype != torch.uint8 or tuple(key.shape) != (_KEY,):
        raise InvalidMessage("it sent no public key")
    return bytes(key.tolist())


def _envelopes(answer: NodeMessage) -> list[Envelope]:
    to = fields(answer.header, {"to": list})["to"]
    if not are_counts(to):
        raise InvalidMessage("it did not say to whom it passes its frames on")
    return [Envelope(*pair) for pair in zip(to, as_frames(answer.tensors))]


def as_tensors(frames: Sequence[bytes]) -> dict[str, Tensor]:
    """Return frames as the tensors of a message."""
    return {f"{k}": torch.frombuffer(bytearray(frame), dtype=torch.uint8) for k, frame in enumerate(frames)}


def as_frames(tensors: dict[str, Tensor]) -> list[bytes]:
    """Return the frames of a message, in order; InvalidMessage for other tensors.

    >>> as_frames(as_tensors([b"one", b"two"]))
    [b'one', b'two']
    """
    if any(tensor.dtype != torch.uint8 or tensor.ndim != 1 for tensor in tensors.values()):
        raise InvalidMessage("frames are bytes")
    if set(tensors) != {f"{number}" for number in range(len(tensors))}:
        raise InvalidMessage("its frames are not numbered")
    return [tensors[f"{number}"].numpy().tobytes() for number in range(len(tensors))]
