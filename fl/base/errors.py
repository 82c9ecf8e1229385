"""The exception of this package, and its kinds that callers tell apart; and the end by a signal."""

from collections.abc import Iterator
from contextlib import contextmanager

from surgery import SurgeryError


class FLError(ValueError):
    """Something that cannot be run; the message is one line that names the setting and the way out."""


class Diverged(FLError):
    """Training that cannot go on because every client of a round failed."""


class Refused(FLError):
    """A backend that cannot train a model which another backend may train."""


class Unwritable(FLError):
    """A file that cannot be written: a full disk, a folder that is read-only."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops what Ctrl-C stops, and in the same way."""


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Within it, what surgery refuses is the fault of this flag.

    >>> with naming("--fedmr.unit"):
    ...     raise SurgeryError("there is no such unit")
    Traceback (most recent call last):
    fl.base.errors.FLError: --fedmr.unit: there is no such unit
    """
    try:
        yield
    except SurgeryError as error:
        raise FLError(f"{flag}: {error}") from None
