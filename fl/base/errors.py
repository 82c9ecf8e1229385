"""The exception of this package, its kinds that callers tell apart, the end by a signal; and what raises them."""

import re
from collections.abc import Iterator
from contextlib import contextmanager

from surgery import SurgeryError
from surgery.memory import shortage


class FLError(ValueError):
    """Something that cannot be run; the message is one line that names the setting and the way out.

    Where it names flags, a note, which only a traceback shows, says what these are called from Python.
    """

    def __init__(self, *message: object) -> None:
        super().__init__(*message)
        if words := in_python(str(self)):
            self.add_note(words)


class Diverged(FLError):
    """Training that cannot go on because every client of a round failed."""


class Refused(FLError):
    """A backend that cannot train a model which another backend may train."""


class Unwritable(FLError):
    """A file that cannot be written: a full disk, a folder that is read-only."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops what Ctrl-C stops, and in the same way."""


_ARGUMENTS = {"name": "folder=...", "out": "folder=...", "resume": "resume=True", "seeds": "seed=..."}
"""Flags of the command alone, and the arguments of `fl.simulate` and `fl.Config.of` that do what they do."""


def in_python(message: str) -> str:
    """Say what the flags that a message names are called from Python; "" if it names none.

    >>> in_python("choose another --name, or give --femam.start global, and leave --flip out")
    'from Python: --name is folder=..., --femam.start is femam={"start": ...}, --flip is flip=...'
    """
    words = []
    for flag in dict.fromkeys(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*(?:\.[a-z][a-z0-9-]*)?)", message)):
        group, dot, name = flag.replace("-", "_").rpartition(".")
        argument = _ARGUMENTS.get(flag, f'{group}={{"{name}": ...}}' if dot else f"{name}=...")
        words += [f"--{flag} is {argument}"] if flag != "help" else []
    return f"from Python: {', '.join(words)}" if words else ""


@contextmanager
def naming(flag: str) -> Iterator[None]:
    """Turn a SurgeryError within the block into an FLError that names a flag.

    >>> try:
    ...     with naming("--fedmr.unit"):
    ...         raise SurgeryError("there is no such unit", code="argument")
    ... except FLError as error:
    ...     print(error)
    --fedmr.unit: there is no such unit
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
