"""The errors of this package."""


class SurgeryError(ValueError):
    """An operation that cannot be done; the message names the tensor or layer, the shapes and the way out."""


class InternalError(RuntimeError):
    """A mistake in this package, not in what it was given: a rule for an operation is wrong, say."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its type if it has none.

    >>> first_line(ValueError("no.\\n(more)")), first_line(KeyError())
    ('no', 'KeyError')
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".!")
