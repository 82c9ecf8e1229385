"""Memory is asked for before it is taken, so that what is too large is refused with its reason."""

from fl.base.errors import FLError
from surgery.memory import shortage


def ask(needed: int, what: str, instead: str) -> None:
    """Raise FLError if so many bytes of the CPU's memory are not free.

    Args:
        what: takes them.
        instead: what to do.

    >>> ask(10**18, "a batch", "use less")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fl.base.errors.FLError: a batch would take at least 1,000,000,000.0 GB of memory, and ... GB are free: use less
    """
    if reason := shortage(needed):
        raise FLError(f"{what} {reason}: {instead}")
