"""A client's side of the four stages."""

import random
from collections import defaultdict
from collections.abc import Sequence

from fl.secure.crypto import seal
from fl.secure.party import Envelope, Party, random_bytes
from fl.secure.wire import SEALED_EXTRA, SERVER, UPLOAD, Kind, Message, Sealed, listed


class Client(Party):
    """A client that gives some of its sealed pieces away, returns others for those it received, and uploads the result.

    Only its choices (which pieces to give, to whom, which to return) decide the result; keys, tags and sessions are
    always random and never change it.

    Args:
        address: its number, below SERVER.
        pieces: its trained model in two or more pieces, each as long as everybody else's.
        server: the server's public key.
        choices: the source of its choices; None: the operating system. Simulations give a seeded one.
    """

    def __init__(
        self, address: int, pieces: Sequence[bytes], server: bytes, choices: random.Random | None = None
    ) -> None:
        super().__init__(address)
        self._pieces, self._server = pieces, server
        self._length = max(map(len, pieces))
        self._choices = choices or random.SystemRandom()
        self._past: set[bytes] = set()  # sessions that came to nothing
        self._told = 0  # how many of the faults the server knows
        self._restart(b"")

    def _restart(self, session: bytes) -> None:
        self._connect(session, {SERVER: self._server})
        self._peers: list[int] = []
        self._model: dict[int, bytes] = {}  # sealed pieces, by number
        self._given: dict[int, int] = {}  # the peer to whom each piece that is away was given
        self._got: dict[int, dict[int, dict[int, bytes]]] = defaultdict(lambda: defaultdict(dict))  # phase, peer, piece
        self._done: dict[int, set[int]] = defaultdict(set)  # peers that have sent all of a phase
        self._blamed: set[int] = set()
        self._settled = True

    def _admits(self, message: Message) -> bool:
        new = message.sender == SERVER and message.session not in self._past | {self._session}
        if new:  # the server began again, without some client; this model is the trained one again
            self._past.add(self._session)
            self._restart(message.session)
        return super()._admits(message)

    def _handle(self, message: Message) -> bool:
        match message.kind, message.sender == SERVER:
            case Kind.OPEN, True:
                self._begin_session(message.body)
            case Kind.BEGIN, True:
                self._begin(message.phase)
            case Kind.PIECE, False:
                return self._take(message)
            case Kind.DONE, False:
                return self._finished(message)
            case Kind.NUDGE, True:
                self._look_around(message.body)
            case Kind.ASK, _:
                self._send_again(message.sender, message.body)
            case _:
                return False
        return True

    def _begin_session(self, body: bytes) -> None:
        """Meet the cohort, and seal the own pieces, all with the same length."""
        cohort = {int.from_bytes(body[i : i + 4], "big"): body[i + 4 : i + 36] for i in range(0, len(body), 36)}
        del cohort[self.address]
        self._peers = list(cohort)
        self._join(cohort)
        for number, piece in enumerate(self._pieces):
            padded = piece.ljust(self._length, b"\0")
            content = Sealed(self._session, number, random_bytes(), padded).encode()
            self._model[number] = seal(content, self._server)
        self._send(SERVER, Kind.READY)

    def _begin(self, phase: int) -> None:
        for peer in self._peers:  # they have received everything sent before, or else the server would not go on
            self._channels[peer].frames.clear()
        for old in [p for p in self._got if p < phase - 1]:
            del self._got[old], self._done[old]
        self.phase = phase
        if phase == UPLOAD:
            for number, blob in sorted(self._model.items()):
                self._send(SERVER, Kind.PIECE, number, blob)
            self._model = {}  # the frames are kept in case they have to be sent again
            return
        self._settled = False
        self._give() if phase % 2 else self._give_back()
        for peer in self._peers:
            self._send(peer, Kind.DONE)
        self._settle()

    def _give(self) -> None:
        """Stage 1: give a random part of the pieces, at least one but not all, each to one random other client."""
        count = len(self._pieces)
        chosen = self._choices.randrange(1, 2**count - 1)
        self._given = {n: self._choices.choice(self._peers) for n in range(count) if chosen >> n & 1}
        self._hand_out([(peer, number, self._model.pop(number)) for number, peer in self._given.items()])

    def _give_back(self) -> None:
        """Stage 3: return, for every piece that came from a peer, one random element of that piece's buffer."""
        got = self._got[self.phase - 1]
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
        self._hand_out(returned)

    def _hand_out(self, parcels: list[tuple[int, int, bytes]]) -> None:
        """Send tuples (peer, number, sealed piece) in an order that does not reveal which pieces they are."""
        random.SystemRandom().shuffle(parcels)  # not from `choices`: the order does not change the result
        for peer, number, blob in parcels:
            self._send(peer, Kind.PIECE, number, blob)

    def _take(self, message: Message) -> bool:
        """Stages 2 and 4: keep an incoming piece with the others that came from the same peer in that phase."""
        got = self._got[message.phase][message.sender]
        fits = len(message.body) == self._length + SEALED_EXTRA and message.piece < len(self._pieces)
        if not fits or message.piece in got or message.phase not in (self.phase, self.phase + 1):
            return False
        if message.sender in self._done[message.phase]:  # it said that it would send no more
            return False
        got[message.piece] = message.body
        return True

    def _finished(self, message: Message) -> bool:
        """A peer has sent all its pieces. In stage 4 these must be one for each piece that it was given."""
        phase, peer = message.phase, message.sender
        due = {number for number, to in self._given.items() if to == peer}
        if phase not in (self.phase, self.phase + 1) or (phase % 2 == 0 and self._got[phase][peer].keys() != due):
            return False
        self._done[phase].add(peer)
        self._settle()
        return True

    def _wrong(self, sender: int) -> None:
        self._blamed.add(sender)  # and this client does not go on with it: see `_missing`
        super()._wrong(sender)

    def _settle(self) -> None:
        """End a phase when everything has arrived. In stage 4 the pieces left and those returned are a model again."""
        if self._settled or self._missing():
            return
        self._settled = True
        if self.phase % 2 == 0:
            for peer in self._peers:
                self._model |= self._got[self.phase][peer]
        self._send(SERVER, Kind.READY)

    def _missing(self) -> list[int]:
        """The peers for which this phase still waits."""
        if self._settled:
            return []
        return [peer for peer in self._peers if peer not in self._done[self.phase] or peer in self._blamed]

    def _look_around(self, lacks: bytes) -> None:
        """The server finds this client late: ask for messages that did not come, repeat those that did not arrive.

        The order matters: repeated messages may let the server go on and send what would then be asked for too early.
        """
        missing = self._missing()
        for other in (SERVER, *missing):
            self._send(other, Kind.ASK, body=self._channels[other].lacks())
        self._send(SERVER, Kind.WAITING, body=listed(missing))
        self._send_again(SERVER, lacks)

    def _flush(self) -> list[Envelope]:
        if self._session:
            for fault in self.faults[self._told :]:
                self._send(SERVER, Kind.FAULT, body=fault.encode())
            self._told = len(self.faults)
        return super()._flush()
