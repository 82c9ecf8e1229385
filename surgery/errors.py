"""The errors of this package."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch

Code = Literal[
    "argument",  # an argument is of a wrong type, out of range or missing, or does not go with another one
    "name",  # there is no module, tensor, width, section, method or library's model of this name or pattern
    "mismatch",  # states or models do not fit each other: names, shapes, dtypes, devices or structure differ
    "ambiguous",  # what was given allows several results: say more, by an example or a name
    "unsupported",  # a kind of model, layer, tensor or file that this package does not handle
    "missing",  # a library that is needed is not installed
    "run",  # the model, or a function that was given, fails or computes something else when it is called
    "width",  # a width cannot change as asked: it keeps its size, or the order of its positions matters
    "depth",  # a section cannot have this depth, or the model does not run with it
    "target",  # a size cannot be reached
    "strict",  # under `strict`: a number, a configuration or an unused tensor would not follow the widths
    "values",  # a tensor holds NaN or infinity, has no values (meta device), or none that the operation can use
    "plan",  # a plan is damaged, of another model, or does more than is possible there
    "file",  # a file cannot be read or written, holds something else, or is there already
]
"""The kind of thing that went wrong, for code that continues in different ways."""


class SurgeryError(ValueError):
    """An operation that is not possible; the message names the cause and the way out.

    Attributes:
        code: the kind of error, one of `surgery.errors.Code`. Messages may change, codes do not.

    >>> from surgery import load
    >>> try:
    ...     load(torch.nn.Linear(2, 3), {"weight": torch.zeros(3, 2)})
    ... except SurgeryError as error:
    ...     print(error.code)
    mismatch
    """

    def __init__(self, message: str, *, code: Code) -> None:
        super().__init__(message)
        self.code: Code = code

    def __reduce__(self) -> tuple[Any, ...]:  # by default the class is called with the message alone
        return partial(type(self), code=self.code), (str(self),), vars(self)


class InternalError(RuntimeError):
    """A mistake in this package, such as a wrong rule for an operation."""


@contextmanager
def explain(task: str, hint: str = "") -> Iterator[None]:
    """Turn errors of foreign code into a SurgeryError of code `run` that names a task.

    SurgeryErrors pass unchanged.

    >>> with explain("loss(model, batch) fails", "; give floats"): raise TypeError("int")
    Traceback (most recent call last):
    ...
    surgery.errors.SurgeryError: loss(model, batch) fails: int; give floats
    """
    try:
        yield
    except (SurgeryError, InternalError):
        raise
    except Exception as error:
        raise SurgeryError(f"{task}: {first_line(error)}{hint}", code="run") from error


@contextmanager
def about(subject: str) -> Iterator[None]:
    """Begin a SurgeryError from this block with its subject; its code stays.

    >>> with about("plan.json"): raise SurgeryError("no plan", code="plan")
    Traceback (most recent call last):
    ...
    surgery.errors.SurgeryError: plan.json: no plan
    """
    try:
        yield
    except SurgeryError as error:
        raise SurgeryError(f"{subject}: {error}", code=error.code) from None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory ran out, on the CPU or a GPU; torch has several errors.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")), is_out_of_memory(KeyError())
    (True, False)
    """
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError)
        and any(words in str(error) for words in ("can't allocate memory", "not enough memory"))
    )


def first_line(error: BaseException) -> str:
    """Return an error's first line (two if it ends in a colon), or its type's name.

    >>> first_line(ValueError("no.\\n(more)")), first_line(KeyError()), first_line(KeyError(3))
    ('no', 'KeyError', 'no key 3')
    >>> first_line(ValueError("not valid:\\n    3 is odd.\\n(more)"))
    'not valid: 3 is odd'
    """
    line, *more = str(error).strip().splitlines() or [type(error).__name__]
    line = (f"{line} {more[0].strip()}" if more and line.endswith(":") else line).rstrip(".!")
    return f"no key {line}" if isinstance(error, KeyError) and error.args else line
