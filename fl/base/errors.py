"""The exception of this package, its kinds that callers tell apart, the end by a signal; and what raises them."""

from collections.abc import Iterator
from contextlib import contextmanager

from surgery import SurgeryError
from surgery.memory import shortage


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
    """Turn a SurgeryError within the block into an FLError that names a flag.

    >>> with naming("--fedmr.unit"):
    ...     raise SurgeryError("there is no such unit", code="argument")
    Traceback (most recent call last):
    fl.base.errors.FLError: --fedmr.unit: there is no such unit
    """
    try:
        yield
    except SurgeryError as error:
        raise FLError(f"{flag}: {error}") from None


def reason(error: str | BaseException) -> str:
    """Return the text of an exception in one line.

    >>> reason(KeyError("users"))
    "KeyError: 'users'"
    >>> reason(AssertionError())
    'AssertionError'
    """
    if isinstance(error, KeyError):  # whose text is the bare key
        return f"KeyError: {error}"
    return " ".join(str(error).split()) or type(error).__name__


def ask_memory(needed: int, what: str, instead: str) -> None:
    """Raise FLError if so many bytes of the CPU's memory are not free, before they are taken.

    Args:
        what: takes them.
        instead: what to do.

    >>> ask_memory(10**18, "a batch", "use less")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fl.base.errors.FLError: a batch would take at least 1,000,000,000.0 GB of memory, and ... GB are free: use less
    """
    if lack := shortage(needed):
        raise FLError(f"{what} {lack}: {instead}")
