"""A client's side of the four stages."""

import json
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from fl.base.errors import FLError
from fl.secure.boxes import SEALED_EXTRA, SERVER, Keys, PlainMessage, make_refusal, seal


class Envelope(NamedTuple):
    """A frame to send.

    Its carrier sees who writes to whom, when, and how many bytes; nothing else.
    """

    recipient: int
    frame: bytes


class Client:
    """A client that exchanges some of its sealed pieces, and uploads the result.

    It returns other pieces for the pieces that it receives. Repeat r has the phases 2r - 1 (stage 1: pieces go out) and
    2r (stages 2 and 3: pieces come back); in the next one the model is whole again (stage 4), and is uploaded if that
    was the last repeat. A client does nothing between the phases: what it then has to know is in `dump`.

    Only its choices (which pieces to give, to whom, which to return) decide the result; keys, tags and sessions are
    always random and never change it.

    Args:
        address: its number, below SERVER.
        pieces: its trained model in two or more pieces, each as long as every other client's.
        server: the server's public key.
        repeats: how often the stages are repeated before it uploads.
        choices: the source of its choices; None: the operating system. Simulations give a seeded one.
        secret: its secret key, if it has one already.

    Attributes:
        public: the public key that the others have to know.
        phase: the last one that it took part in.
    """

    def __init__(
        self,
        address: int,
        pieces: Sequence[bytes],
        server: bytes,
        repeats: int = 1,
        choices: random.Random | None = None,
        secret: bytes | None = None,
    ) -> None:
        self.address, self.repeats, self.phase = address, repeats, 0
        self._pieces, self._server = pieces, server
        self._length = max(map(len, pieces))
        self._choices = choices or random.SystemRandom()
        self._keys = Keys(secret)
        self.public = self._keys.public
        self._sessions: list[bytes] = []  # the last one is the one that counts
        self._peers: dict[int, bytes] = {}  # public keys
        self._model: dict[int, bytes] = {}  # sealed pieces, by number
        self._given: dict[int, int] = {}  # the peer to whom each piece that is away was given

    @property
    def finished(self) -> bool:
        """True if it has uploaded."""
        return self.phase > 2 * self.repeats

    def step(self, phase: int, frames: Sequence[bytes]) -> list[Envelope]:
        """Do what a phase asks for.

        Args:
            frames: for phase 1, with which every attempt begins, the server's; otherwise the frames that other clients
                sent in the phase before.

        Raises:
            FLError: names both ends of a message that was forged, altered, sent before, lost, or that the protocol does
                not ask for.
        """
        if self.finished or phase not in (1, self.phase + 1):
            raise FLError(f"client {self.address} was asked for phase {phase} after phase {self.phase}", code="peers")
        if phase == 1:
            self._begin(frames)
        else:
            got = self._receive(frames)
        self.phase = phase
        if phase % 2 == 0:
            return self._send(self._give_back(got))
        if phase > 1:
            self._complete(got)
        return self._send(self._upload() if self.finished else self._give())

    def _begin(self, frames: Sequence[bytes]) -> None:
        """Meet the cohort, and seal the own pieces, all with the same length.

        Nothing of an earlier attempt counts.
        """
        if len(frames) != 1:
            raise FLError(
                f"client {self.address} got {len(frames)} messages at the beginning, where one is sent", code="peers"
            )
        message = self._keys.unlock(frames[0], {SERVER: self._server}, self.address)
        if message.session in self._sessions:
            raise make_refusal(SERVER, self.address, "was sent before")
        body = message.body
        self._peers = {int.from_bytes(body[i : i + 4], "big"): body[i + 4 : i + 36] for i in range(0, len(body), 36)}
        del self._peers[self.address]
        self._sessions.append(message.session)
        padded = [piece.ljust(self._length, b"\0") for piece in self._pieces]
        self._model = {
            number: seal(message.session, number, piece, self._server) for number, piece in enumerate(padded)
        }
        self._given = {}

    def _receive(self, frames: Sequence[bytes]) -> dict[int, dict[int, bytes]]:
        """Stages 2 and 4: the pieces that came from each peer."""
        got: dict[int, dict[int, bytes]] = defaultdict(dict)
        for frame in frames:
            session, phase, piece, sender, _, blob = self._keys.unlock(frame, self._peers, self.address)
            if (session, phase) != (self._sessions[-1], self.phase) or piece in got[sender]:
                raise make_refusal(sender, self.address, "was sent before")
            if len(blob) != self._length + SEALED_EXTRA or piece >= len(self._pieces):
                raise make_refusal(sender, self.address, "is not what the protocol asks for")
            got[sender][piece] = blob
        return got

    def _complete(self, got: dict[int, dict[int, bytes]]) -> None:
        """Make a model of kept and returned pieces, one for each given (stage 4)."""
        for peer in self._peers:
            if got[peer].keys() != {number for number, to in self._given.items() if to == peer}:
                raise FLError(f"client {peer} did not return to client {self.address} what it was given", code="peers")
            self._model |= got[peer]

    def _upload(self) -> list[tuple[int, int, bytes]]:
        return [(SERVER, number, blob) for number, blob in self._model.items()]

    def _give(self) -> list[tuple[int, int, bytes]]:
        """Give some random pieces to one random other client each (stage 1).

        At least one piece, but not all.
        """
        count, peers = len(self._pieces), list(self._peers)
        chosen = self._choices.randrange(1, 2**count - 1)
        self._given = {n: self._choices.choice(peers) for n in range(count) if chosen >> n & 1}
        return [(peer, number, self._model.pop(number)) for number, peer in self._given.items()]

    def _give_back(self, got: dict[int, dict[int, bytes]]) -> list[tuple[int, int, bytes]]:
        """Return a random element of its buffer for every piece of a peer (stage 3)."""
        returned = []
        for number in range(len(self._pieces)):
            givers = [peer for peer in self._peers if number in got[peer]]
            buffer = [got[peer][number] for peer in givers]
            if number in self._model:
                buffer.append(self._model.pop(number))
            self._choices.shuffle(buffer)
            returned += [(peer, number, buffer.pop()) for peer in givers]
            if buffer:
                self._model[number] = buffer.pop()
        return returned

    def _send(self, parcels: list[tuple[int, int, bytes]]) -> list[Envelope]:
        """Return (recipient, number, sealed piece) as frames, in an order without meaning."""
        random.SystemRandom().shuffle(parcels)  # not from `choices`: the order does not change the result
        publics = {**self._peers, SERVER: self._server}
        envelopes = []
        for to, number, blob in parcels:
            message = PlainMessage(self._sessions[-1], self.phase, number, self.address, to, blob)
            envelopes.append(Envelope(to, self._keys.lock(message, publics[to])))
        return envelopes

    def dump(self) -> bytes:
        """Return all that it has to know in the next phase, its secret key among it."""
        header = {
            "address": self.address,
            "repeats": self.repeats,
            "phase": self.phase,
            "server": self._server.hex(),
            "secret": self._keys.secret.hex(),
            "sessions": [session.hex() for session in self._sessions],
            "peers": {peer: public.hex() for peer, public in self._peers.items()},
            "given": self._given,
            "pieces": [len(piece) for piece in self._pieces],
            "model": list(self._model),
        }
        head = json.dumps(header).encode()
        return b"".join([len(head).to_bytes(8, "big"), head, *self._pieces, *self._model.values()])

    @classmethod
    def load(cls, data: bytes, choices: random.Random | None = None) -> "Client":
        """Return the inverse of `dump`. Raises ValueError or KeyError for other bytes."""
        begin = 8 + int.from_bytes(data[:8], "big")
        header = json.loads(data[8:begin])

        def cut(length: int) -> bytes:
            nonlocal begin
            begin += length
            if begin > len(data):
                raise ValueError("cut short")
            return data[begin - length : begin]

        pieces = [cut(length) for length in header["pieces"]]
        server, secret = bytes.fromhex(header["server"]), bytes.fromhex(header["secret"])
        client = cls(header["address"], pieces, server, header["repeats"], choices, secret)
        client.phase = header["phase"]
        client._sessions = [bytes.fromhex(session) for session in header["sessions"]]
        client._peers = {int(peer): bytes.fromhex(public) for peer, public in header["peers"].items()}
        client._given = {int(number): peer for number, peer in header["given"].items()}
        client._model = {number: cut(client._length + SEALED_EXTRA) for number in header["model"]}
        return client
