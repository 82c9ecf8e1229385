"""One round of secure recombination: the server's side, and both sides."""

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from fl.base.errors import FLError
from fl.secure.boxes import SEALED_EXTRA, SERVER, Keys, PlainMessage, make_refusal
from fl.secure.client import Client, Envelope

ALONE = "alone: its model could not be hidden among others"
INTERRUPTED = "a client was lost while they uploaded"

Carrier: TypeAlias = Callable[[int, dict[int, list[bytes]]], Mapping[int, Sequence[Envelope]]]
"""(phase, the frames for each client) -> what each client sends in this phase, see `Client.step`; one that is missing
is lost."""


class Outcome(NamedTuple):
    """The result of a round.

    Attributes:
        models: the recombined model that each client uploaded, piece by piece; together they are the trained models of
            exactly these clients, if they were honest. Empty if fewer than two were left, or a client was lost in the
            upload.
        excluded: the other clients, and why each is missing.
        sent: the bytes that went from one party to another, by (sender, recipient); one of the two may be SERVER.
        seconds: how long it took.
    """

    models: dict[int, list[bytes]]
    excluded: dict[int, str]
    sent: Mapping[tuple[int, int], int]
    seconds: float

    @property
    def reasons(self) -> list[str]:
        """The reason why each client that is missing was left out, in words."""
        return [f"client {client} is left out ({reason})" for client, reason in self.excluded.items()]


class Server:
    """The leader of a round; it opens pieces once every client has uploaded its model.

    Args:
        lengths: bytes of each piece.
        repeats: how often pieces are exchanged before the upload.

    Attributes:
        public: the public key that the clients have to know.
    """

    def __init__(self, lengths: Sequence[int], repeats: int) -> None:
        self._lengths, self._last = lengths, 2 * repeats + 1
        self._keys = Keys()
        self.public = self._keys.public

    def run(self, publics: Mapping[int, bytes], carry: Carrier) -> Outcome:
        """Let the clients with these public keys exchange pieces and upload them.

        If some are lost, the others begin again from their trained models; if one is lost in the upload, nothing is
        used, so that the server does not get models of two attempts.

        Raises FLError, which names the client, for uploads that are no permutation of the clients' pieces.
        """
        began, sent = time.perf_counter(), Counter[tuple[int, int]]()
        models, excluded, cohort = {}, {}, dict(publics)
        while len(cohort) > 1 and not models:
            lost, phase, session, frames = self._attempt(cohort, carry, sent)
            if not lost:
                models = self._open_uploads(session, cohort, frames)
            elif phase == self._last:
                excluded |= dict.fromkeys(cohort, INTERRUPTED)
            excluded |= dict.fromkeys(lost, f"lost in phase {phase} of {self._last}")
            cohort = {client: public for client, public in cohort.items() if client not in excluded}
        if not models:
            excluded |= dict.fromkeys(cohort, ALONE)
        return Outcome(models, excluded, sent, time.perf_counter() - began)

    def _attempt(
        self, cohort: Mapping[int, bytes], carry: Carrier, sent: Counter[tuple[int, int]]
    ) -> tuple[list[int], int, bytes, list[bytes]]:
        """Return the lost clients, the phase, the session, and the uploaded frames."""
        session = os.urandom(16)
        everybody = b"".join(client.to_bytes(4, "big") + public for client, public in cohort.items())
        waiting = {}
        for client, public in cohort.items():
            waiting[client] = [self._keys.lock(PlainMessage(session, 0, 0, SERVER, client, everybody), public)]
            sent[SERVER, client] += len(waiting[client][0])
        for phase in range(1, self._last + 1):
            answers = carry(phase, waiting)
            if lost := [client for client in cohort if client not in answers]:
                return lost, phase, session, []
            waiting = {client: [] for client in ([SERVER] if phase == self._last else cohort)}
            for client in cohort:
                for recipient, frame in answers[client]:
                    if recipient not in waiting:
                        raise make_refusal(client, recipient, "is not what the protocol asks for")
                    waiting[recipient].append(frame)
                    sent[client, recipient] += len(frame)
        return [], self._last, session, waiting[SERVER]

    def _open_uploads(
        self, session: bytes, cohort: Mapping[int, bytes], frames: Sequence[bytes]
    ) -> dict[int, list[bytes]]:
        """Return the uploads, after checks of their pieces.

        Every piece has to be of this session and in its place, and none may come twice.
        """
        uploads: dict[int, dict[int, bytes]] = {client: {} for client in cohort}
        tags: set[bytes] = set()
        for frame in frames:
            message = self._keys.unlock(frame, dict(cohort), SERVER)
            number, client = message.piece, message.sender
            if (message.session, message.phase) != (session, self._last) or number in uploads[client]:
                raise make_refusal(client, SERVER, "was sent before")
            if len(message.body) != max(self._lengths) + SEALED_EXTRA or number >= len(self._lengths):
                raise make_refusal(client, SERVER, "is not what the protocol asks for")
            sealed = self._keys.unseal(message.body)
            if not sealed or sealed[:2] != (session, number) or sealed.tag in tags:
                raise FLError(
                    f"a piece that client {client} uploaded cannot be opened, is another one, or was uploaded before",
                    code="peers",
                )
            tags.add(sealed.tag)
            uploads[client][number] = sealed.payload[: self._lengths[number]]
        for client, pieces in uploads.items():
            if len(pieces) < len(self._lengths):
                raise FLError(f"client {client} uploaded {len(pieces)} of {len(self._lengths)} pieces", code="peers")
        return {client: [pieces[number] for number in sorted(pieces)] for client, pieces in uploads.items()}


def exchange(
    models: Mapping[int, Sequence[bytes]],
    repeats: int = 1,
    choices: Mapping[int, random.Random] | None = None,
) -> Outcome:
    """Recombine the models of clients securely.

    Args:
        models: each client's trained model, by its address, in pieces that have the same lengths for all clients.
        repeats: how often the four stages are repeated.
        choices: the source of each client's choices; None: the operating system for all.

    Raises:
        FLError: without PyNaCl, without models, for impossible addresses, for fewer than two pieces or one repeat, and
            for pieces of different lengths.

    >>> trained = {client: [b"first of %d" % client, b"second of %d" % client] for client in (1, 2, 3)}
    >>> outcome = exchange(trained, repeats=2)
    >>> sorted(first for first, _ in outcome.models.values())
    [b'first of 1', b'first of 2', b'first of 3']
    >>> outcome.excluded
    {}
    """
    if not models:
        raise FLError("there is no model to exchange: give those of two or more clients")
    for address in models:
        if not 0 <= address < SERVER:
            raise FLError(f"clients' addresses are numbers from 0 to {SERVER - 1}, got {address}")
    shapes = {tuple(map(len, pieces)) for pieces in models.values()}
    if len(shapes) != 1:
        raise FLError(
            f"models of one architecture are exchanged: got pieces of {len(shapes)} different sets of lengths",
            code="mismatch",
        )
    (lengths,) = shapes
    if len(lengths) < 2:
        raise FLError("secure recombination needs two or more pieces: a model in one piece would only change hands")
    if repeats < 1:
        raise FLError(f"secure recombination takes 1 repeat or more, got {repeats}")
    choices, server = choices or {}, Server(lengths, repeats)
    clients = {a: Client(a, pieces, server.public, repeats, choices.get(a)) for a, pieces in models.items()}
    publics = {address: client.public for address, client in clients.items()}
    return server.run(publics, lambda phase, waiting: {a: clients[a].step(phase, waiting[a]) for a in waiting})
