"""Errors by their codes: tests hold the kind of an error and the thing that it names, and leave its wording free."""

from contextlib import contextmanager
from typing import get_args

import pytest

from surgery import SurgeryError
from surgery.errors import Code
from zoo import ZooError
from zoo.errors import Code as ZooCode


@contextmanager
def refused(expected, *names, error=SurgeryError):
    """Expect a SurgeryError with a code and a message in which names stand, of tensors, modules, flags or files.

    Args:
        expected: the code, or "code: name".

    >>> with refused("mismatch: 'weight'", "(2,)"):
    ...     raise SurgeryError("tensor 'weight' has shape (2,)", code="mismatch")
    """
    code, _, name = expected.partition(": ")
    assert code in get_args(Code if error is SurgeryError else ZooCode), code
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
    for one in filter(None, (name, *names)):
        assert one in str(caught.value), str(caught.value)


def zoo_refused(expected, *names):
    """As `refused`, for a ZooError."""
    return refused(expected, *names, error=ZooError)
