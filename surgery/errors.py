"""The errors of this package."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SurgeryError(ValueError):
    """An operation that cannot be done; the message names the tensor or layer, the shapes and the way out."""


class InternalError(RuntimeError):
    """A mistake in this package, not in what it was given: a rule for an operation is wrong, say."""


@contextmanager
def explained(what: str, hint: str = "") -> Iterator[None]:
    """Whatever somebody's code raises here becomes a SurgeryError that says `what` failed; this package's errors pass.

    >>> with explained("loss(model, batch) fails", "; give floats"): raise TypeError("int")
    Traceback (most recent call last):
    ...
    surgery.errors.SurgeryError: loss(model, batch) fails: int; give floats
    """
    try:
        yield
    except (SurgeryError, InternalError):
        raise
    except Exception as error:
        raise SurgeryError(f"{what}: {first_line(error)}{hint}") from error


@contextmanager
def about(what: str) -> Iterator[None]:
    """A SurgeryError that is raised here begins with what it is about.

    >>> with about("plan.json"): raise SurgeryError("no plan")
    Traceback (most recent call last):
    ...
    surgery.errors.SurgeryError: plan.json: no plan
    """
    try:
        yield
    except SurgeryError as error:
        raise SurgeryError(f"{what}: {error}") from None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory left, of the processor's or of a GPU's, for which torch has several errors.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")), is_out_of_memory(KeyError())
    (True, False)
    """
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError)
        and any(words in str(error) for words in ("can't allocate memory", "not enough memory"))
    )


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with the second if it ends in a colon, or its type's name if it has none.

    >>> first_line(ValueError("no.\\n(more)")), first_line(KeyError()), first_line(KeyError(3))
    ('no', 'KeyError', 'no key 3')
    >>> first_line(ValueError("not valid:\\n    3 is odd.\\n(more)"))
    'not valid: 3 is odd'
    """
    line, *more = str(error).strip().splitlines() or [type(error).__name__]
    line = (f"{line} {more[0].strip()}" if more and line.endswith(":") else line).rstrip(".!")
    return f"no key {line}" if isinstance(error, KeyError) and error.args else line
