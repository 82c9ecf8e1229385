"""The exception of this package, its kinds, the end by a signal."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal, get_args

from surgery import SurgeryError
from surgery.memory import shortage

Code = Literal[
    "argument",  # a setting or an argument is of a wrong type, out of range or missing, or excludes another one
    "name",  # there is no method, model, data set, metric, setting or column of this name, or there is one already
    "unsupported",  # a method, model, backend, device or kind of data that cannot do what a setting asks for
    "missing",  # a library that is needed is not installed, not in a version that serves, or not set up
    "run",  # a module, a function or a file of a user's cannot be imported, fails, or returns something else
    "data",  # samples, labels or owners that cannot be used: types, shapes, values, or too few of them
    "mismatch",  # models, weights or samples do not fit each other
    "file",  # a file cannot be read, written or fetched, holds something else, or is there already
    "folder",  # a run folder exists, is in use, has no run (yet), or has one of other settings, models or data
    "peers",  # nodes of clients, or ranks, do not answer, or send what does not fit
    "diverged",  # training cannot continue, since losses or weights became infinite or not a number
    "memory",  # what was asked for needs more memory than is free
]
"""What kind of thing went wrong, for code that reacts to it in different ways."""


class FLError(ValueError):
    """Something that cannot be run.

    The message is one line that names the setting and the way out. Where it names flags, a note, which only a traceback
    shows, says what these are called from Python.

    Attributes:
        code: the kind of error, one of `fl.base.errors.Code`. Messages may change, codes do not.

    >>> import fl
    >>> try:
    ...     fl.Config.of(algorithm="fedmr", rounds=0).check()
    ... except fl.FLError as error:
    ...     print(error.code)
    argument
    """

    def __init__(self, message: str, *, code: Code = "argument") -> None:
        super().__init__(message)
        self.code: Code = code
        if words := in_python(message):
            self.add_note(words)

    def __reduce__(self) -> tuple[Any, ...]:  # by default the class is called with the message alone
        return partial(type(self), code=self.code), (str(self),), vars(self)


class Diverged(FLError):
    """Training that cannot continue because every client of a round failed."""

    def __init__(self, message: str, *, code: Code = "diverged") -> None:
        super().__init__(message, code=code)


class Refused(FLError):
    """A backend that cannot train a model which another backend may train."""

    def __init__(self, message: str, *, code: Code = "unsupported") -> None:
        super().__init__(message, code=code)


class Unwritable(FLError):
    """A file that cannot be written: a full disk, a folder that is read-only."""

    def __init__(self, message: str, *, code: Code = "file") -> None:
        super().__init__(message, code=code)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops what Ctrl-C stops, and in the same way."""


_ARGUMENTS = {"name": "folder=...", "out": "folder=...", "resume": "resume=True", "seeds": "seed=..."}
"""Flags of the command alone, and the arguments of `fl.simulate` and `fl.Config.of` that do what they do."""


def in_python(message: str) -> str:
    """Say what the flags that a message names are called in Python; "" for none.

    >>> in_python("choose another --name, or give --femam.start global, and leave --flip out")
    'from Python: --name is folder=..., --femam.start is femam={"start": ...}, --flip is flip=...'
    """
    words = []
    for flag in dict.fromkeys(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]*(?:\.[a-z][a-z0-9-]*)?)", message)):
        group, dot, name = flag.replace("-", "_").rpartition(".")
        argument = _ARGUMENTS.get(flag, f'{group}={{"{name}": ...}}' if dot else f"{name}=...")
        words += [f"--{flag} is {argument}"] if flag != "help" else []
    return f"from Python: {', '.join(words)}" if words else ""


def code_of(error: SurgeryError) -> Code:
    """Return the code with which an FLError hands on a SurgeryError, if there is one.

    >>> code_of(SurgeryError("no such unit", code="argument")), code_of(SurgeryError("cumsum", code="width"))
    ('argument', 'unsupported')
    """
    return next((code for code in get_args(Code) if code == error.code), "unsupported")


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
        raise FLError(f"{flag}: {error}", code=code_of(error)) from None


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


def ask_memory(needed: int, purpose: str, instead: str) -> None:
    """Raise FLError if the CPU's memory has fewer bytes free than are needed.

    It is called before they are taken.

    Args:
        purpose: what takes them.
        instead: what to do.

    >>> ask_memory(10**18, "a batch", "use less")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fl.base.errors.FLError: a batch would take at least 1,000,000,000.0 GB of memory, and ... GB are free: use less
    """
    if lack := shortage(needed):
        raise FLError(f"{purpose} {lack}: {instead}", code="memory")
