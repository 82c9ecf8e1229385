"""What the server and the clients have in common: authenticated, numbered messages, each delivered once, in order."""

import os
from abc import ABC, abstractmethod
from typing import NamedTuple

from fl.secure.crypto import Keys, Lock
from fl.secure.faults import Cause, Fault
from fl.secure.wire import Kind, Message, listed, numbers


class Envelope(NamedTuple):
    """A frame on its way. Its carrier sees who writes to whom, when, and how many bytes; nothing else."""

    sender: int
    recipient: int
    frame: bytes


class Channel:
    """Both directions between two parties, for one session."""

    def __init__(self, lock: Lock) -> None:
        self.lock = lock
        self.frames: dict[int, bytes] = {}  # by number: frames that may have to be sent again
        self.sent = self.arrived = self.signals = 0
        self.early: dict[int, Message] = {}  # messages that overtook others
        self.signalled: set[int] = set()

    def accept(self, message: Message) -> list[Message] | None:
        """The messages that can be delivered now that this one has come; None if it had come before."""
        if message.kind >= Kind.NUDGE:
            if message.number in self.signalled:
                return None
            self.signalled.add(message.number)
            return [message]
        if message.number <= self.arrived or message.number in self.early:
            return None
        self.early[message.number] = message
        ready = []
        while (number := self.arrived + 1) in self.early:
            ready.append(self.early.pop(number))
            self.arrived = number
        return ready

    def lacks(self) -> bytes:
        """The messages that arrived, so that the other side can send the rest: all up to a number, and some beyond."""
        return listed([self.arrived, *self.early])

    def again(self, lacks: bytes) -> list[bytes]:
        """The frames that did not arrive on the other side."""
        arrived, *early = numbers(lacks) or [0]
        return [frame for number, frame in self.frames.items() if number > arrived and number not in early]


class Party(ABC):
    """One end of the protocol: bytes come in, bytes go out.

    Frames that are forged, repeated or foreign are noted in `faults`, and otherwise ignored.

    Attributes:
        public: the public key that the others have to know.
        phase: the phase of this party, see `fl.secure.wire`.
        faults: those noticed by or reported to this party, each once.
    """

    def __init__(self, address: int) -> None:
        self.address = address
        self.phase = 0
        self.faults: list[Fault] = []
        self._keys = Keys()
        self.public = self._keys.public
        self._session = b""
        self._channels: dict[int, Channel] = {}
        self._out: list[Envelope] = []

    def receive(self, frame: bytes) -> list[Envelope]:
        """Take a frame from the network; returns the envelopes to send."""
        if (message := self._open(frame)) is not None:
            ready = self._channels[message.sender].accept(message)
            if ready is None:
                self._note(Cause.REPEATED, message.sender, self.address)
            for delivered in ready or ():
                if not self._handle(delivered):
                    self._wrong(delivered.sender)
        return self._flush()

    @abstractmethod
    def _handle(self, message: Message) -> bool:
        """Act on a message; False if it is not what the protocol asks for."""

    def _admits(self, message: Message) -> bool:
        """Whether a message may come from this session."""
        return message.session == self._session

    def _wrong(self, sender: int) -> None:
        self._note(Cause.WRONG, sender, self.address)

    def _open(self, frame: bytes) -> Message | None:
        sender = int.from_bytes(frame[:4], "big")
        if sender not in self._channels:
            return self._note(Cause.FOREIGN, sender, self.address)
        plain = self._channels[sender].lock.open(frame[4:])
        if plain is None:
            return self._note(Cause.TAMPERED, sender, self.address)
        message = Message.decode(plain)
        if message is None:
            return self._wrong(sender)
        if (message.sender, message.recipient) != (sender, self.address):  # a box opens on both sides: this is an own
            return self._note(Cause.TAMPERED, sender, self.address)  # message sent back
        if not self._admits(message):
            return self._note(Cause.STALE, sender, self.address)
        return message

    def _connect(self, session: bytes, publics: dict[int, bytes]) -> None:
        """Begin a session with these parties, all counters at zero."""
        self._session, self.phase = session, 0
        self._channels = {}
        self._join(publics)

    def _join(self, publics: dict[int, bytes]) -> None:
        """Add parties to the session."""
        self._channels |= {address: Channel(self._keys.box(public)) for address, public in publics.items()}

    def _send(self, recipient: int, kind: Kind, piece: int = 0, body: bytes = b"") -> None:
        channel = self._channels[recipient]
        if kind >= Kind.NUDGE:
            number = channel.signals = channel.signals + 1
        else:
            number = channel.sent = channel.sent + 1
        message = Message(self._session, self.address, recipient, kind, self.phase, number, piece, body)
        frame = self.address.to_bytes(4, "big") + channel.lock.close(message.encode())
        if kind < Kind.NUDGE:
            channel.frames[number] = frame
        self._out.append(Envelope(self.address, recipient, frame))

    def _send_again(self, recipient: int, lacks: bytes) -> None:
        for frame in self._channels[recipient].again(lacks):
            self._note(Cause.LOST, self.address, recipient)
            self._out.append(Envelope(self.address, recipient, frame))

    def _note(self, cause: Cause, sender: int, recipient: int) -> None:
        fault = Fault(self.phase, cause, sender, recipient)
        if fault not in self.faults:
            self.faults.append(fault)

    def _flush(self) -> list[Envelope]:
        out, self._out = self._out, []
        return out


def random_bytes() -> bytes:
    """16 bytes that nobody can guess, or will draw again."""
    return os.urandom(16)
