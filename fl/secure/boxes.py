"""Keys, messages between two parties, and pieces that only the server can open.

PyNaCl is imported when first needed.
"""

import os
from struct import Struct, error
from typing import Any, NamedTuple

from fl.base.errors import FLError
from fl.base.plugins import needed

SERVER = 2**32 - 1
"""The server's address. Clients have smaller ones."""

_HEADER = Struct(">16sIIII")
_SEALED = Struct(">16sI16s")
SEALED_EXTRA = _SEALED.size + 48
"""How many bytes a sealed piece has more than the longest piece: its header and the sealed box."""
LOCKED_EXTRA = 4 + 40 + _HEADER.size
"""How many bytes a locked message has more than its body: the sender's address, the box, and its header."""


def require() -> Any:
    """Return the module nacl.public; FLError if PyNaCl is missing."""
    return needed("secure recombination", "secure", "nacl.public")


class PlainMessage(NamedTuple):
    """A message from one party to another, before it is locked.

    Attributes:
        session: 16 random bytes, new in every attempt.
        phase: in which it was sent, see `fl.secure.client`.
        piece: the number of the piece in the body.
    """

    session: bytes
    phase: int
    piece: int
    sender: int
    recipient: int
    body: bytes


class Sealed(NamedTuple):
    """The content of a sealed piece, which only the server can read.

    Attributes:
        tag: 16 random bytes, so that a doubled piece is recognised although no one knows whose it was.
        payload: the piece, padded with zeros to the longest piece's length.
    """

    session: bytes
    piece: int
    tag: bytes
    payload: bytes


class Keys:
    """A key pair: X25519, with XSalsa20-Poly1305 for the boxes.

    Args:
        secret: of an earlier pair; None: a fresh one.

    Attributes:
        public: 32 bytes that anyone may know.
        secret: 32 bytes that no one else may know.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        nacl = require()
        self._key = nacl.PrivateKey.generate() if secret is None else nacl.PrivateKey(secret)
        self.public, self.secret = bytes(self._key.public_key), bytes(self._key)
        self._boxes: dict[bytes, Any] = {}  # by public key: the secret that two parties share takes long to find

    def _box(self, public: bytes) -> Any:
        if public not in self._boxes:
            self._boxes[public] = require().Box(self._key, require().PublicKey(public))
        return self._boxes[public]

    def lock(self, message: PlainMessage, public: bytes) -> bytes:
        """Return a frame that only its two ends can read or make: an address and a box."""
        import nacl.exceptions

        try:
            box = self._box(public)
        except nacl.exceptions.CryptoError:
            raise FLError(f"{name(message.recipient)} gave a public key that is none", code="peers") from None
        return message.sender.to_bytes(4, "big") + box.encrypt(_HEADER.pack(*message[:-1]) + message.body)

    def unlock(self, frame: bytes, publics: dict[int, bytes], recipient: int) -> PlainMessage:
        """Return the message of a frame that came from one of these parties.

        Raises FLError, which names both ends, for one that is of somebody else, forged or altered.
        """
        import nacl.exceptions

        sender = int.from_bytes(frame[:4], "big")
        if sender not in publics:
            raise FLError(
                f"a message to {name(recipient)} is in the name of {name(sender)}, who takes no part", code="peers"
            )
        try:
            plain = self._box(publics[sender]).decrypt(frame[4:])
            message = PlainMessage(*_HEADER.unpack_from(plain), plain[_HEADER.size :])
            if (message.sender, message.recipient) != (sender, recipient):  # a box opens on both sides: an own one that
                raise ValueError  # was sent back
        except (nacl.exceptions.CryptoError, ValueError, error):  # shorter than any box, or than a header
            raise make_refusal(sender, recipient, "was forged or altered") from None
        return message

    def unseal(self, blob: bytes) -> Sealed | None:
        """Return a seal's content; None if it is for another key, or damaged."""
        import nacl.exceptions

        try:
            plain = require().SealedBox(self._key).decrypt(blob)
        except (nacl.exceptions.CryptoError, ValueError):
            return None
        return Sealed(*_SEALED.unpack_from(plain), plain[_SEALED.size :]) if len(plain) >= _SEALED.size else None


def seal(session: bytes, piece: int, payload: bytes, public: bytes) -> bytes:
    """Lock a piece for the owner of a public key, without revealing who did."""
    nacl = require()
    return nacl.SealedBox(nacl.PublicKey(public)).encrypt(_SEALED.pack(session, piece, os.urandom(16)) + payload)


def make_refusal(sender: int, recipient: int, reason: str) -> FLError:
    """Return the error for a message that cannot be used.

    >>> print(make_refusal(7, SERVER, "was sent before"))
    a message from client 7 to the server was sent before
    """
    return FLError(f"a message from {name(sender)} to {name(recipient)} {reason}", code="peers")


def name(address: int) -> str:
    """Return a party in words."""
    return "the server" if address == SERVER else f"client {address}"
