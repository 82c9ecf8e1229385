"""Whether all ranks are alive: each lets its heart beat in the store, and rank 0 listens; all others listen to rank 0.

A heart beats only while its process computes, or waits for others in plain sight. So a rank that is dead, stopped,
or stuck in something else (a file system that does not answer, a lock that nobody opens) falls silent alike. A rank
that computes for ever is not noticed.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from fl.base.errors import FLError, Terminated

SILENT = 15
"""Seconds without a heartbeat after which a rank counts as lost. torchrun may take 30 more to end what hangs."""

_EVERY = 0.5  # seconds between two beats
_BUSY = 0.005  # of the time between two beats is computing
_GRACE = 2  # seconds in which the main thread may notice by itself that a rank is lost
_GIVE_UP = 10  # seconds after which a main thread that does not react is ended
_ACCEPTED = 15  # seconds in which the others are to react to the end of this rank


class Lost(FLError):
    """A rank has failed, died or hangs."""


class Watch:
    """The heart of this rank, and what it knows of the others.

    Args:
        hosts: the machine of each rank.
        store: where hearts beat.

    Attributes:
        cut: whether the store does not answer any more; whoever asks it would wait for ever.
        saving: whether the main thread is at its end, perhaps saving what there is, and is not to be interrupted.
    """

    def __init__(self, rank: int, hosts: Sequence[str], store: Any) -> None:
        self.rank, self.hosts = rank, hosts
        self._store = store.clone()  # a connection of its own: the main thread's may be waiting
        self._watched = [other for other in range(len(hosts)) if other != rank] if rank == 0 else [0]
        self._waiting, self._over, self.saving, self._lost = 0, False, False, ""
        self._pids: dict[int, int] = {}
        self._store.set(f"pid/{rank}", str(os.getpid()))
        self._main = threading.main_thread().ident
        self._before = signal.signal(signal.SIGTERM, self._ended) if _in_main() else None
        self.cut, self._beats, self._looks = False, 0, 0
        self._thread = threading.Thread(target=self._run, name="fl-heart", daemon=True)
        self._thread.start()
        threading.Thread(target=self._guard, name="fl-guard", daemon=True).start()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Within it, this rank waits for others, which is no sign of hanging."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def check(self) -> None:
        """Raise Lost if a rank is lost."""
        if self._lost:
            self.saving = True
            raise Lost(self._lost)

    def blamed(self) -> Lost | None:
        """The rank that is lost, after a moment in which that can show."""
        for _ in range(10):
            if reason := self._lost or self._dead_here():
                self._lost = reason
                return Lost(reason)
            time.sleep(0.2)
        return None

    def leave(self) -> None:
        """This rank's heart stops without a fault. Rank 0, if the store is its own and not torchrun's, waits for the
        others to leave, which need it to the end.
        """
        self._end("left")
        if self.rank == 0 and not self._lost and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            self._until(
                lambda: all(
                    self._beat_of(rank).startswith(("left", "failed")) or self._gone(rank) for rank in self._watched
                )
            )

    def fail(self, reason: str) -> None:
        """This rank's heart stops with a fault; returns when rank 0 has left, too, or has had time to."""
        self._end(f"failed {reason}")
        if self.rank and not self._lost and not self.cut:
            self._until(lambda: self._beat_of(0).startswith(("left", "failed")))

    def _until(self, done: Callable[[], bool]) -> None:
        limit = time.monotonic() + _ACCEPTED
        with suppress(RuntimeError):
            while time.monotonic() < limit and not done():
                time.sleep(0.05)

    def speaks(self) -> bool:
        """Whether it is for this rank to tell the user: rank 0, or the first of the others that finds it lost."""
        if self.rank == 0:
            return True
        if not self._lost:
            return False
        if self.cut:  # and the others cannot be asked
            return self.rank == 1
        try:
            return self._store.compare_set("speaker", "", str(self.rank)).decode() == str(self.rank)
        except RuntimeError:
            return self.rank == 1

    def _end(self, last: str) -> None:
        if self._over:
            return
        self._over = self.saving = True
        if not self.cut:
            self._thread.join(SILENT)
            with suppress(RuntimeError):
                self._store.set(f"beat/{self.rank}", last)
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _run(self) -> None:
        computed = _computed()
        heard = dict.fromkeys(self._watched, ("", 0))
        while not self._over:
            time.sleep(_EVERY)
            now = _computed()
            if self._waiting or now - computed > _BUSY * _EVERY:
                self._beats += 1
            computed = now
            self._looks += 1
            try:
                self._store.set(f"beat/{self.rank}", str(self._beats))
                for rank in self._watched:
                    beat = self._beat_of(rank)
                    heard[rank] = beat, (heard[rank][1] + 1 if beat == heard[rank][0] else 0)
                    self._lost = self._lost or self._fault(rank, *heard[rank])
            except RuntimeError:
                self._lost, self.cut = self._lost or self._silent(), True
            if self._lost:
                self._wake()
                return

    def _fault(self, rank: int, beat: str, same: int) -> str:
        """What is wrong with a rank, if anything is.

        Args:
            same: how often its last beat was found again. Looks are counted, and not seconds, since the whole machine
                may have slept.
        """
        name = f"rank {rank} ({self.hosts[rank]})"
        if beat.startswith("failed"):
            return f"{name}: {beat.removeprefix('failed ')}"
        if beat == "left":
            return "rank 0 has left" if rank == 0 else ""
        if self._gone(rank):
            return f"{name} died"
        return f"{name} has not computed or answered for {SILENT} seconds" if same * _EVERY > SILENT else ""

    def _guard(self) -> None:
        """Notice that the store has fallen silent: then the thread above waits for it, and perhaps the main thread."""
        looks, same = 0, 0
        while not self._over and not self._lost:
            time.sleep(_EVERY)
            looks, same = self._looks, same + 1 if looks == self._looks else 0
            if same * _EVERY > SILENT:
                self._lost, self.cut = self._silent(), True
                self._wake()

    def _silent(self) -> str:
        return f"the machine of rank 0 ({self.hosts[0]}) does not answer any more"

    def _wake(self) -> None:
        """Bring the main thread to its end."""
        limit = time.monotonic() + _GIVE_UP
        time.sleep(_GRACE)
        while not self.saving and time.monotonic() < limit:
            signal.pthread_kill(self._main, signal.SIGTERM)
            time.sleep(_GRACE)
        if not self.saving:
            if self.speaks():
                print(f"\nerror: {self._lost}", file=sys.__stderr__, flush=True)  # rank 0 may have left a bar
            os._exit(2)

    def _ended(self, number: int, frame: Any) -> None:
        """SIGTERM: from torchrun, because a rank died or all are to stop, or from the thread above."""
        if self.saving:
            return
        self.saving = True
        if lost := self.blamed():
            raise lost
        if callable(self._before):  # a handler of the user's
            self._before(number, frame)
        raise Terminated

    def _dead_here(self) -> str:
        """Which rank of this machine is no process any more."""
        try:
            gone = [rank for rank in range(len(self.hosts)) if rank != self.rank and self._gone(rank)]
        except RuntimeError:
            return self._silent()
        return f"rank {gone[0]} ({self.hosts[gone[0]]}) died" if gone else ""

    def _gone(self, rank: int) -> bool:
        """Whether a rank is on this machine, and no process any more."""
        if self.hosts[rank] != self.hosts[self.rank] or self._beat_of(rank) == "left":
            return False
        if rank not in self._pids and self._store.check([f"pid/{rank}"]):
            self._pids[rank] = int(self._store.get(f"pid/{rank}"))
        try:
            os.kill(pid := self._pids[rank], 0)
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "Z"  # dead, and nobody has asked how it ended
        except ProcessLookupError:
            return True
        except (OSError, KeyError):  # another system, or another user's process, or one that is only starting
            return False

    def _beat_of(self, rank: int) -> str:
        key = f"beat/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _computed() -> float:
    """Seconds that the process has computed, without the thread that asks."""
    return time.process_time() - time.thread_time()


def _in_main() -> bool:
    return threading.current_thread() is threading.main_thread()
