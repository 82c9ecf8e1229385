"""The layout in bytes of messages, which have a header of constant size, and of sealed pieces."""

from enum import IntEnum
from struct import Struct, error, iter_unpack
from typing import NamedTuple

SERVER = 2**32 - 1
"""The server's address. Clients have smaller ones."""

UPLOAD = 2**32 - 1
"""The last phase. The first is 0, where clients join; repeat r has the phases 2r - 1 (pieces go out) and 2r (pieces
come back)."""


class Kind(IntEnum):
    """Kinds of messages. Those from NUDGE on may be lost without harm and may arrive in any order."""

    OPEN = 1  # server: an attempt begins; the body lists the cohort and its public keys
    BEGIN = 2  # server: a phase begins
    READY = 3  # client: done with the phase
    PIECE = 4  # client: one sealed piece
    DONE = 5  # client to client: no more pieces from me in this phase
    FAULT = 6  # client to server: I noticed a fault
    NUDGE = 7  # server: you are not ready. What do you lack? The body is that of ASK
    ASK = 8  # send again what I lack of your messages: the body says what has arrived
    WAITING = 9  # client to server: the body lists the clients that I wait for


class Message(NamedTuple):
    """The content of a frame.

    Attributes:
        session: 16 random bytes, new in every attempt.
        number: counts the sender's messages to the recipient in this session, from 1.
        piece: for PIECE, the number of the piece in the body.
    """

    session: bytes
    sender: int
    recipient: int
    kind: Kind
    phase: int
    number: int
    piece: int
    body: bytes

    def encode(self) -> bytes:
        """
        >>> message = Message(b"s" * 16, 3, SERVER, Kind.PIECE, UPLOAD, 9, 0, b"...")
        >>> len(message.encode()), Message.decode(message.encode()) == message
        (40, True)
        """
        return _HEADER.pack(*self[:-1]) + self.body

    @classmethod
    def decode(cls, data: bytes) -> "Message | None":
        """The inverse of `encode`; None for other bytes."""
        try:
            session, sender, recipient, kind, *numbers = _HEADER.unpack_from(data)
            return cls(session, sender, recipient, Kind(kind), *numbers, data[_HEADER.size :])
        except (error, ValueError):
            return None


_HEADER = Struct(">16sIIBIII")


class Sealed(NamedTuple):
    """The content of a sealed piece, which only the server can read.

    Attributes:
        tag: 16 random bytes, so that a doubled piece is recognised although nobody knows whose it was.
        payload: the piece, padded with zeros to the longest piece's length.
    """

    session: bytes
    piece: int
    tag: bytes
    payload: bytes

    def encode(self) -> bytes:
        return _SEALED.pack(*self[:-1]) + self.payload

    @classmethod
    def decode(cls, data: bytes) -> "Sealed | None":
        """The inverse of `encode`; None for other bytes."""
        return cls(*_SEALED.unpack_from(data), data[_SEALED.size :]) if len(data) >= _SEALED.size else None


_SEALED = Struct(">16sI16s")
SEALED_EXTRA = _SEALED.size + 48
"""How many bytes a sealed piece has more than the longest piece: its header, and those of the sealed box."""


def numbers(body: bytes) -> list[int]:
    """The numbers that a body lists.

    >>> numbers(listed([7, 1]))
    [7, 1]
    """
    return [number for (number,) in iter_unpack(">I", body[: len(body) // 4 * 4])]


def listed(values: list[int]) -> bytes:
    """The body that lists some numbers."""
    return b"".join(value.to_bytes(4, "big") for value in values)


def where(phase: int) -> str:
    """A phase in words, with Appendix B's stages.

    >>> where(0), where(1), where(4), where(UPLOAD)
    ('opening', 'repeat 1, stages 1-2', 'repeat 2, stages 3-4', 'upload')
    """
    if phase in (0, UPLOAD):
        return "upload" if phase else "opening"
    return f"repeat {(phase + 1) // 2}, stages {'1-2' if phase % 2 else '3-4'}"


def name(address: int) -> str:
    """
    >>> name(7), name(SERVER)
    ('client 7', 'the server')
    """
    return "the server" if address == SERVER else f"client {address}"
