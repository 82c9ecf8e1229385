"""Errors by their codes: tests hold the kind of an error and the thing that it names, and leave its wording free."""

from contextlib import contextmanager
from typing import get_args

import pytest

from fl import FLError
from fl.base.errors import Code as FLCode
from surgery import SurgeryError
from surgery.errors import Code
from zoo import ZooError
from zoo.errors import Code as ZooCode

CODES = {SurgeryError: get_args(Code), ZooError: get_args(ZooCode), FLError: get_args(FLCode)}


@contextmanager
def refused(expected, *names, error=SurgeryError):
    """Expect an error with a code and a message in which names stand, of tensors, modules, flags or files.

    Args:
        expected: the code, or "code: name".

    >>> with refused("mismatch: 'weight'", "(2,)"):
    ...     raise SurgeryError("tensor 'weight' has shape (2,)", code="mismatch")
    """
    code, _, name = expected.partition(": ")
    assert code in CODES[error], code
    with pytest.raises(error) as caught:
        yield caught
    assert caught.value.code == code, f"{caught.value.code}: {caught.value}"
    for one in filter(None, (name, *names)):
        assert one in str(caught.value), str(caught.value)


def zoo_refused(expected, *names):
    """As `refused`, for a ZooError."""
    return refused(expected, *names, error=ZooError)


def fl_refused(expected, *names):
    """As `refused`, for an FLError."""
    return refused(expected, *names, error=FLError)
