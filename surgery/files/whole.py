"""Files and folders that are complete or absent."""

import logging
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from surgery.errors import SurgeryError

_log = logging.getLogger(__name__)
_END = f"@{socket.gethostname()}.tmp"  # numbers of processes mean nothing on other hosts of a shared disk


@contextmanager
def replacing(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """Yield a path to write to, which replaces the given one when the block ends well.

    Otherwise it is deleted, and what was there stays. An OSError becomes a SurgeryError that names the path. What
    killed processes have left beside it is deleted first.
    """
    try:
        for left in leftovers(path.parent):
            with suppress(OSError):  # another user's
                _delete(left)
                _log.warning("deleted %s, which a command that was killed had left", left)
        with in_one_step(path, folder=folder) as temporary:
            yield temporary
    except OSError as error:
        raise SurgeryError(f"{path} cannot be written: {error.strerror or error}", code="file") from None


@contextmanager
def in_one_step(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """Do as `replacing`, but keep OSErrors and what killed processes have left."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_END}")
    try:
        if folder:
            temporary.mkdir()
        yield temporary
        for file in sorted(temporary.iterdir()) if folder else [temporary]:
            with open(file, "rb+") as written:
                os.fsync(written.fileno())
        os.replace(temporary, path)
    finally:
        _delete(temporary)


def check_absent(path: Path, *, folder: bool = False) -> None:
    """Raise SurgeryError unless something new can be written to a path.

    Nothing may be there (for a folder: nothing but an empty folder), not even a device or a link, and its parent must.
    """
    try:
        there = path.exists() or path.is_symlink()
        if there and folder and path.is_dir() and not path.is_symlink() and not path.is_mount():
            there = any(path.iterdir()) or path.samefile(Path.cwd())
    except OSError as error:
        raise SurgeryError(f"{path} cannot be written: {error.strerror or error}", code="file") from None
    if there:
        raise SurgeryError(f"{path} exists already: give a new name, or delete it first", code="file")
    if not path.parent.is_dir():
        raise SurgeryError(f"{path}: there is no folder {path.parent}", code="file")


def is_plain(name: str) -> bool:
    """Return whether a text names something in the folder itself, not outside of it.

    >>> is_plain("net.pt"), is_plain("a/net.pt"), is_plain(".."), is_plain("")
    (True, False, False, False)
    """
    return name not in ("", "..") and Path(name).name == name


def leftovers(folder: Path, name: str | None = None) -> list[Path]:
    """Return what ended processes of this host left for a file of this name, or any.

    >>> leftovers(Path("there is none"))
    []
    """
    paths: list[Path] = []
    with suppress(OSError):  # a folder that may be written to and not read
        paths += folder.iterdir() if os.name == "posix" else ()  # elsewhere, os.kill ends the process that it asks for

    def is_left(path: Path) -> bool:
        start, _, process = path.name.removesuffix(_END).rpartition(".")
        matches = start == f".{name}" if name else start.startswith(".")
        return matches and path.name.endswith(_END) and process.isdecimal() and _is_dead(int(process))

    return [path for path in paths if is_left(path)]


def _is_dead(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    return False


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
