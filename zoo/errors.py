"""The error of this package, and how others are told."""

from functools import partial
from typing import Any, Literal

Code = Literal[
    "argument",  # an argument is of a wrong type or out of range, or the model does not take it
    "name",  # there is no model of this name
    "mismatch",  # a state belongs to another model
    "unsupported",  # a kind of layer or of network that the zoo does not handle
    "file",  # a file or a text in YAML cannot be read, or holds no weights and no spec
]
"""The kind of thing that went wrong, for code that continues in different ways."""


class ZooError(ValueError):
    """A model that cannot be built; the message names the argument and valid values.

    Attributes:
        code: the kind of error, one of `zoo.errors.Code`. Messages may change, codes do not.
    """

    def __init__(self, message: str, *, code: Code) -> None:
        super().__init__(message)
        self.code: Code = code

    def __reduce__(self) -> tuple[Any, ...]:  # by default the class is called with the message alone
        return partial(type(self), code=self.code), (str(self),), vars(self)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its type if it has none.

    >>> first_line(ValueError("no\\nand more")), first_line(KeyError())
    ('no', 'KeyError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]
