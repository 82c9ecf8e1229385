"""The server's side: it starts the phases, notices who is missing, begins again without them, and opens the uploads."""

from collections import Counter
from collections.abc import Collection, Mapping

from fl.secure.faults import Cause, Fault
from fl.secure.party import Envelope, Party, random_bytes
from fl.secure.wire import SEALED_EXTRA, SERVER, UPLOAD, Kind, Message, Sealed, name, numbers, where

TRIES = 3
"""How often a late client is asked before the others go on without it."""


class Server(Party):
    """Coordinates one round; opens pieces only when every client of an attempt has uploaded its whole model.

    Args:
        lengths: bytes of each piece.
        repeats: how often pieces are exchanged before the upload.

    Attributes:
        finished: whether the round is over.
        attempts: how often the exchange began.
        models: each client's upload, opened; empty unless all went well.
        excluded: for other clients, why their models are missing.
    """

    def __init__(self, lengths: list[int], repeats: int) -> None:
        super().__init__(SERVER)
        self._lengths, self._phases = lengths, [0, *range(1, 2 * repeats + 1), UPLOAD]
        self.finished, self.attempts = False, 0
        self.models: dict[int, list[bytes]] = {}
        self.excluded: dict[int, str] = {}

    def start(self, cohort: Mapping[int, bytes]) -> list[Envelope]:
        """Begin with clients whose public keys are given; returns the envelopes to send."""
        self._cohort = dict(cohort)
        self._attempt()
        return self._flush()

    def tick(self) -> list[Envelope]:
        """Time passed and nothing came: ask the late clients, or give them up. Returns the envelopes to send."""
        self._asked += 1
        if self._asked > TRIES:
            self._give_up()
        else:
            self._heard.clear()
            for client in self._late():
                self._send(client, Kind.NUDGE, body=self._channels[client].lacks())
        return self._flush()

    def _attempt(self) -> None:
        """Begin with everybody's own trained model; nothing of earlier attempts is kept."""
        self._uploads: dict[int, dict[int, bytes]] = {client: {} for client in self._cohort}
        if len(self._cohort) < 2:
            return self._end("alone: its model could not be hidden among others")
        self.attempts += 1
        self._connect(random_bytes(), self._cohort)
        cohort = b"".join(client.to_bytes(4, "big") + public for client, public in self._cohort.items())
        self._begin(0)
        for client in self._cohort:
            self._send(client, Kind.OPEN, body=cohort)

    def _begin(self, phase: int) -> None:
        self.phase = phase
        self._asked, self._ready, self._heard = 0, set(), set()
        self._waiting: dict[int, list[int]] = {}
        if phase:
            for client in self._cohort:
                self._send(client, Kind.BEGIN)

    def _late(self) -> list[int]:
        return [client for client in self._cohort if client not in self._ready]

    def _handle(self, message: Message) -> bool:
        client = message.sender
        self._heard.add(client)
        match message.kind:
            case Kind.READY if message.phase == self.phase != UPLOAD and client not in self._ready:
                self._is_ready(client)
            case Kind.PIECE if self.phase == UPLOAD:
                return self._take(client, message)
            case Kind.FAULT if fault := Fault.decode(message.body):
                if fault not in self.faults:
                    self.faults.append(fault)
            case Kind.WAITING:
                self._waiting[client] = numbers(message.body)
            case Kind.ASK:
                self._send_again(client, message.body)
            case _:
                return False
        return True

    def _take(self, client: int, message: Message) -> bool:
        got = self._uploads[client]
        fits = len(message.body) == max(self._lengths) + SEALED_EXTRA and message.piece < len(self._lengths)
        if not fits or message.piece in got:
            return False
        got[message.piece] = message.body
        if len(got) == len(self._lengths):
            self._is_ready(client)
        return True

    def _is_ready(self, client: int) -> None:
        self._ready.add(client)
        self._asked = 0
        if not self._late():
            if self.phase == UPLOAD:
                self._open_all()
            else:
                self._begin(self._phases[self._phases.index(self.phase) + 1])

    def _open_all(self) -> None:
        """Open the uploads. Every piece has to be of this session and in its place, and none may come twice."""
        tags: set[bytes] = set()
        models: dict[int, list[bytes]] = {client: [] for client in self._cohort}
        for client, pieces in self._uploads.items():
            for number, length in enumerate(self._lengths):
                plain = self._keys.unseal(pieces[number])
                sealed = None if plain is None else Sealed.decode(plain)
                if sealed and sealed[:2] == (self._session, number) and sealed.tag not in tags:
                    tags.add(sealed.tag)
                    models[client].append(sealed.payload[:length])
                else:
                    self._note(Cause.UNUSABLE, client, SERVER)
        if any(len(model) < len(self._lengths) for model in models.values()):  # nobody knows whose pieces are missing
            return self._end("the uploads were not usable as a whole")
        self.models, self.finished = models, True

    def _give_up(self) -> None:
        """Go on without clients that do not answer; if all do, without those whom messages do not leave or reach."""
        silent = [client for client in self._late() if client not in self._heard]
        if silent:
            out = dict.fromkeys(silent, "did not answer")
        else:
            out = _blocking({client: self._waiting.get(client, []) for client in self._late()}, self._cohort)
        for client, reason in out.items():
            self.excluded[client] = f"{where(self.phase)}: {reason}"
            del self._cohort[client]
        self._attempt()

    def _end(self, reason: str) -> None:
        self.excluded |= dict.fromkeys(self._cohort, reason)
        self.finished = True


def _blocking(waiting: Mapping[int, list[int]], cohort: Collection[int]) -> dict[int, str]:
    """Few clients without whom nobody waits for anybody, and why they were taken. Of two, the one waited for.

    >>> _blocking({1: [4], 2: [4], 3: [4]}, [1, 2, 3, 4])
    {4: 'client 1, client 2, client 3 waited for it'}
    >>> _blocking({1: [2, 3]}, [1, 2, 3])
    {1: 'it waited for client 2, client 3'}
    """
    out: dict[int, str] = {}
    edges = [(late, peer) for late, peers in waiting.items() for peer in peers if peer in cohort]
    if not edges:
        return dict.fromkeys(waiting, "its messages do not arrive at the server")
    while edges:
        named = Counter(peer for _, peer in edges)
        ends = named + Counter(late for late, _ in edges)
        worst = max((ends[client], named[client], client) for client in ends)[-1]
        from_it = [late for late, peer in edges if peer == worst]
        to_it = [peer for late, peer in edges if late == worst]
        reasons = [f"{', '.join(map(name, from_it))} waited for it"] * bool(from_it)
        reasons += [f"it waited for {', '.join(map(name, to_it))}"] * bool(to_it)
        out[worst] = "; ".join(reasons)
        edges = [edge for edge in edges if worst not in edge]
    return out
