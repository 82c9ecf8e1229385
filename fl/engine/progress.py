"""Count the clients of a cohort that have been trained, for whoever shows it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_LOCK = threading.Lock()  # the threads of `workers` count side by side
_listener: Callable[[float, int], None] | None = None
_done, _total = 0.0, 0


@contextmanager
def listen(listener: Callable[[float, int], None] | None) -> Iterator[None]:
    """Call the listener with (clients done, clients of the cohort) in the block.

    It is called whenever some are done.

    That may be from another thread. None: no one is called, and no client is counted.

    >>> with listen(lambda done, total: print(f"{done:g} of {total}")):
    ...     begin(3)
    ...     count(1)
    ...     count(0.5)
    1 of 3
    1.5 of 3
    """
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before


def begin(clients: int) -> None:
    """Begin to count: this many clients train from now on, perhaps a few at a time."""
    global _done, _total
    _done, _total = 0.0, clients


def count(clients: float) -> None:
    """Count more clients as done; a part of a client where all train side by side."""
    global _done
    if _listener is not None:
        with _LOCK:
            _done += clients
            _listener(_done, _total)
