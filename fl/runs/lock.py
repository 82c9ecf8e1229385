"""Locks of run folders: one process at a time works in one."""

import errno
import logging
import os
import shlex
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fl.base.console import in_command, program
from fl.base.errors import FLError
from fl.base.files import is_leftover, remove_leftover, writing

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None

FILE, SETTINGS = ".lock", "config.yaml"
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_NEITHER = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_log = logging.getLogger("fl")


@contextmanager
def open_run_folder(folder: Path, resume: bool) -> Iterator[None]:
    """Lock a run folder within the block; make it unless a run is resumed.

    A new folder that is empty at the end, as after settings that were refused, is deleted again.

    Raises FLError for a folder that another process works in, cannot be made, or (not resuming) has something in it. An
    empty one is taken: that is what a process leaves that was killed before it had written its settings.
    """
    if resume and not folder.is_dir():
        raise FLError(f"{folder} is not a run folder, so nothing can be resumed there", code="folder")
    created = [] if resume else _make(folder)
    try:
        with folder_lock(folder):
            if not resume:
                _check_unused(folder)
            yield
    finally:
        for path in created:
            with suppress(OSError):  # it has something in it
                path.rmdir()


def is_unused(folder: Path) -> bool:
    """Return whether there is no such folder, or an empty one."""
    if not folder.exists():
        return True
    return folder.is_dir() and all(path.name == FILE or is_leftover(path.name) for path in folder.iterdir())


def _check_unused(folder: Path) -> None:
    if is_unused(folder):
        return
    if (folder / SETTINGS).exists():
        if in_command():
            resume = f"{program('run')} --resume {shlex.quote(str(folder))}"
            raise FLError(f"{folder} exists already: choose another --name, or continue with `{resume}`", code="folder")
        raise FLError(f"{folder} exists already: choose another folder, or continue with resume=True", code="folder")
    raise FLError(
        f"{folder} exists already and holds no run that could be resumed (there is no {SETTINGS}): choose another "
        "--name, or move away what is in it",
        code="folder",
    )


def _make(folder: Path) -> list[Path]:
    """Make a folder; returns those that there were not, the innermost first."""
    try:
        _check_unused(folder)
        created = [path for path in (folder, *folder.parents) if not path.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except FLError:
        raise
    except (OSError, ValueError) as error:
        raise FLError(f"{folder} cannot be made: {getattr(error, 'strerror', error)}", code="file") from None
    return created


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder for as long as the block lasts.

    The lock is `flock` on a file in the folder, which the system releases when the process dies, however it dies. The
    file goes away at the end, or with the next process; so do temporary files of a process that was killed while it
    wrote. Where the file system has no locks, a warning says so.

    Raises FLError if another process works in the folder, or the lock's file cannot be written to, as where there is a
    link or a pipe of its name.
    """
    path = folder / FILE
    with writing(path):
        handle = _take(path)
    try:
        for left in folder.iterdir():
            if is_leftover(left.name):
                remove_leftover(left)
        yield
    finally:
        with suppress(OSError):  # the folder may be gone; the lock goes with the handle
            path.unlink(missing_ok=True)
        os.close(handle)


def _take(path: Path) -> int:
    """Take the lock, write this process into its file, return the file descriptor."""
    while True:
        # A link is not followed, and a pipe not waited for: the lock is in the way of neither, and says so.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _NEITHER, 0o666)
        try:
            _lock(handle, path.parent)
            if os.path.samestat(os.fstat(handle), path.stat()):
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return handle
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # the process that had it has deleted the file since it was opened


def _lock(handle: int, folder: Path) -> None:
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, "this system has no flock")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
        raise FLError(f"{folder} is in use by {owner}: wait until it has ended, or stop it", code="folder") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _log.warning(f"warning: {folder} cannot be locked ({error.strerror}): make sure that no other process is there")
