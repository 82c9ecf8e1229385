"""The one exception of this package."""


class SurgeryError(ValueError):
    """An operation that cannot be done; the message names the tensor or layer, the shapes and the way out."""


def first_line(error: BaseException) -> str:
    """What an error says, on one line; its type's name if it says nothing.

    >>> first_line(ValueError("no.\\n(more)")), first_line(KeyError())
    ('no', 'KeyError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".!")
