"""What can go wrong on the wire, in words."""

from enum import IntEnum
from struct import Struct, error
from typing import NamedTuple

from fl.secure.wire import name, where


class Cause(IntEnum):
    """Kinds of faults."""

    LOST = 1
    REPEATED = 2
    TAMPERED = 3
    FOREIGN = 4
    STALE = 5
    WRONG = 6
    UNUSABLE = 7


_WORDS = {
    Cause.LOST: "a message from {0} to {1} was lost or late, and was sent again",
    Cause.REPEATED: "a message from {0} to {1} came twice; the second is ignored",
    Cause.TAMPERED: "a message in the name of {0} to {1} was tampered with or forged; it is ignored",
    Cause.FOREIGN: "a message to {1} in the name of {0}, who takes no part; it is ignored",
    Cause.STALE: "a message from {0} to {1} belongs to another attempt; it is ignored",
    Cause.WRONG: "a message from {0} to {1} is not what the protocol asks for; it is ignored",
    Cause.UNUSABLE: "a piece that {0} uploaded cannot be opened, is another one, or was uploaded before",
}


class Fault(NamedTuple):
    """One kind of fault between two parties in one phase, however often it happened.

    Attributes:
        phase: that of the party that noticed it.
        sender, recipient: of the message; the sender is the one that the message claims.

    >>> print(Fault(1, Cause.REPEATED, 7, 3))
    repeat 1, stages 1-2: a message from client 7 to client 3 came twice; the second is ignored
    """

    phase: int
    cause: Cause
    sender: int
    recipient: int

    def __str__(self) -> str:
        return f"{where(self.phase)}: {_WORDS[self.cause].format(name(self.sender), name(self.recipient))}"

    def encode(self) -> bytes:
        return _FAULT.pack(*self)

    @classmethod
    def decode(cls, data: bytes) -> "Fault | None":
        """The inverse of `encode`; None for other bytes."""
        try:
            phase, cause, *addresses = _FAULT.unpack(data)
            return cls(phase, Cause(cause), *addresses)
        except (error, ValueError):
            return None


_FAULT = Struct(">IBII")
