"""The steps of a long command: which one runs is shown, and one that takes too long is stopped."""

import signal
import threading
from collections.abc import Callable
from typing import Any, TextIO, TypeVar

T = TypeVar("T")

_AGAIN = 0.5  # seconds until a step is told again to stop: Python drops what is raised in a destructor or a callback


class Steps:
    """Runs steps, shows each on a stream, and stops those that take longer than a limit.

    On a terminal the step that runs is a line that the next one overwrites; elsewhere nothing is shown.

    Args:
        seconds: the limit of each step; None for no limit. It holds in the main thread of systems that have SIGALRM
            (not on Windows), and between operations: a single matrix product is not stopped.
        stream: where steps are shown; None for nowhere.

    Attributes:
        stopped: the names of the steps that took too long.

    >>> import time
    >>> steps = Steps(seconds=0.1)
    >>> steps("add", lambda: 1 + 1), steps("sleep", lambda: time.sleep(1)), steps.stopped
    (2, None, ['sleep'])
    """

    def __init__(self, seconds: float | None = None, stream: TextIO | None = None) -> None:
        self.seconds = seconds
        self.stopped: list[str] = []
        self._stream = stream if stream is not None and stream.isatty() else None

    def __call__(self, name: str, step: Callable[[], T]) -> T | None:
        """The result of the step; None if it is stopped for taking too long."""
        self._show(f"{name} ...")
        try:
            return _within(self.seconds, step)
        except _TooSlow:
            self.stopped.append(name)
            return None
        finally:
            self._show("")

    def _show(self, text: str) -> None:
        if self._stream:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()


class _TooSlow(BaseException):
    """The step has taken too long. Like KeyboardInterrupt it is no Exception, so that no handler takes it for one."""


def _within(seconds: float | None, step: Callable[[], T]) -> T:
    """The result of the step; raises _TooSlow after so many seconds."""
    if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return step()

    def stop(number: int, frame: Any) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
        return step()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
