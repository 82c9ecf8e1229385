"""SIGTERM ends a run as Ctrl-C does."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fl.base.errors import Terminated


class Ending:
    """True if SIGTERM has come, and when it ends a run.

    Attributes:
        told: whether it has come.
        saving: whether the run saves, so that it ends afterwards.
    """

    told = saving = False

    def look(self) -> None:
        """Raise `Terminated` if SIGTERM has come.

        Python drops what is raised in a callback or in `__del__`.
        """
        if self.told:
            raise Terminated


@contextmanager
def terminable() -> Iterator[Ending]:
    """Raise `Terminated` in the block on SIGTERM, after a handler of the user.

    It comes at once; where Python drops it, at the next `Ending.look`, at another SIGTERM or at the end of the block,
    whichever is first. Once the block is `saving` it comes only at the end: torchrun sends SIGTERM where another rank
    has died, and then this one has to save. It comes in the main thread alone, which is the one that signals reach, and
    where SIGTERM is not ignored. Of several runs side by side the first does it for all.
    """
    ending = Ending()
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if main else None
    if before in (None, signal.SIG_IGN) or getattr(before, "__module__", "") == __name__:
        yield ending
        return

    def ended(number: int, frame: FrameType | None) -> None:
        ending.told = True
        if callable(before):
            before(number, frame)
        # not again while the first one is on its way out
        if not ending.saving and not isinstance(sys.exception(), Terminated | GeneratorExit):
            raise Terminated

    signal.signal(signal.SIGTERM, ended)
    try:
        yield ending
    finally:
        signal.signal(signal.SIGTERM, before)
    ending.look()
