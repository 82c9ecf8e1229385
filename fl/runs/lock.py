"""One process at a time works in a run folder."""

import errno
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fl.base.errors import FLError
from fl.base.files import is_leftover, writing

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None

FILE = ".lock"
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}
_log = logging.getLogger("fl")


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder for as long as the block lasts.

    The lock is `flock` on a file in the folder. The system releases it when the process dies, however it dies, so that
    a lock never outlives its owner; the file itself goes away at the end, or with the next owner. So do the temporary
    files of a process that was killed while it wrote. Where the file system has no locks, a warning says so.

    Raises FLError if another process works in the folder, or the folder cannot be written to.
    """
    path = folder / FILE
    with writing(path):
        handle = _take(path)
    try:
        for left in folder.iterdir():
            if is_leftover(left.name):
                left.unlink(missing_ok=True)
        yield
    finally:
        with suppress(OSError):  # the folder may be gone; the lock goes with the handle
            path.unlink(missing_ok=True)
        os.close(handle)


def is_locked(folder: Path) -> bool:
    """Whether another process works in a folder, as far as its file system tells; asking leaves nothing behind.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with locked(Path(folder)):
    ...         inside = is_locked(Path(folder))
    ...     inside, is_locked(Path(folder))
    (True, False)
    """
    if fcntl is None:
        return False
    try:
        handle = os.open(folder / FILE, os.O_RDONLY)
    except OSError:  # nobody has worked there, or it cannot be read
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two who ask do not see each other
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)  # which releases it at once
    return False


def _take(path: Path) -> int:
    """A file descriptor that holds the lock."""
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not _lock(handle, path) or _is_at(handle, path):
                os.ftruncate(handle, 0)
                os.write(handle, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return handle
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)  # its last owner has deleted the file since it was opened


def _lock(handle: int, path: Path) -> bool:
    """Whether the lock is held now; False where there are no locks."""
    try:
        if fcntl is None:
            raise OSError(errno.ENOSYS, "this system has no flock")
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(handle, 200, 0).decode(errors="replace") or "another process"
        raise FLError(f"{path.parent} is in use by {owner}: wait until it has ended, or stop it") from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _log.warning(
            f"warning: {path.parent} cannot be locked ({error.strerror}): make sure that no other process works in it"
        )
        return False
    return True


def _is_at(handle: int, path: Path) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
