"""Keys, boxes between two parties, and boxes that only the server can open: PyNaCl, imported when first needed."""

from typing import Any

from fl.base.errors import FLError


def require() -> Any:
    """The module nacl.public; FLError that says what to install if PyNaCl is missing."""
    try:
        import nacl.exceptions
        import nacl.public
    except ImportError:
        raise FLError("secure recombination needs PyNaCl: pip install -e '.[secure]'") from None
    return nacl.public


class Keys:
    """A fresh key pair: X25519, with XSalsa20-Poly1305 for the boxes.

    Attributes:
        public: 32 bytes that everybody may know.
    """

    def __init__(self) -> None:
        self._secret = require().PrivateKey.generate()
        self.public = bytes(self._secret.public_key)

    def box(self, peer: bytes) -> "Lock":
        """A lock for messages to and from the owner of a public key; nobody else can read or make them."""
        return Lock(require().Box(self._secret, require().PublicKey(peer)))

    def unseal(self, blob: bytes) -> bytes | None:
        """The content of a seal for this public key; None if it is for another one, or damaged."""
        return Lock(require().SealedBox(self._secret)).open(blob)


class Lock:
    """A box of PyNaCl whose failure to open is a value, None."""

    def __init__(self, box: Any) -> None:
        self._box = box

    def close(self, plain: bytes) -> bytes:
        return bytes(self._box.encrypt(plain))

    def open(self, cipher: bytes) -> bytes | None:
        import nacl.exceptions

        try:
            return self._box.decrypt(cipher)
        except (nacl.exceptions.CryptoError, ValueError):  # ValueError: shorter than any box
            return None


def seal(plain: bytes, public: bytes) -> bytes:
    """Lock bytes so that only the owner of a public key can read them, without revealing who locked them."""
    nacl = require()
    return nacl.SealedBox(nacl.PublicKey(public)).encrypt(plain)
