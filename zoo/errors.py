"""The error of this package, and how others are told."""


class ZooError(ValueError):
    """A model that cannot be built; the message names the argument and the valid values."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type if it has none.

    >>> first_line(ValueError("no\\nand more")), first_line(KeyError())
    ('no', 'KeyError')
    """
    return (str(error).strip() or type(error).__name__).splitlines()[0]
