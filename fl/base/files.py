"""Files that are whole or not there, and errors that name the file."""

import errno
import json
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fl.base.errors import FLError, Unwritable
from surgery.files.whole import in_one_step, leftovers

_log = logging.getLogger("fl")
_FULL = "make room on that disk"
_SHUT = (errno.EACCES, errno.EPERM)
_CLOSED = "change its permissions, or work on a copy of the folder in a place where you may write"
_WAYS_OUT = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EROFS: _CLOSED,
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
}
LARGEST = 2**28
"""Bytes of a text file that is read whole; a metrics.csv of 100,000 rounds has about a tenth of that."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError within the block into an `Unwritable`.

    It names the file and says what to do.
    """
    try:
        yield
    except OSError as error:
        way_out = _WAYS_OUT.get(error.errno, "")
        raise Unwritable(
            f"{path} cannot be written ({error.strerror or error})" + (way_out and f": {way_out}")
        ) from None


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn an OSError within the block into an FLError.

    It says whether the file is missing or why it is not read.
    """
    try:
        yield
    except FileNotFoundError:
        raise FLError(f"{path.parent} has no {path.name}", code="file") from None
    except OSError as error:
        way_out = f"make {path} readable, or work on a copy of the folder that is" * (error.errno in _SHUT)
        way_out = way_out or "put back a copy of the file, or start a new run"
        raise FLError(f"{path} cannot be read ({error.strerror or error}): {way_out}", code="file") from None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to, which replaces `path` in one step.

    If the block fails, it is deleted. What a killed process left that wrote the same file goes as well.

    Raises Unwritable for a full disk, a folder that is read-only, and the like; `path` is then as it was.
    """
    with writing(path):
        for left in leftovers(path.parent, path.name):
            remove_leftover(left)
        with in_one_step(path) as temporary:
            yield temporary


def is_leftover(name: str) -> bool:
    """Return whether a file is a temporary one of `replacing`.

    Only a killed process leaves one.

    >>> is_leftover(".metrics.csv.123@node.tmp"), is_leftover("metrics.csv"), is_leftover(".mine.tmp")
    (True, False, False)
    """
    return bool(re.fullmatch(r"\..+\.[0-9]+@.*\.tmp", name))


def remove_leftover(path: Path) -> None:
    """Delete what a killed process has left, and say so."""
    path.unlink(missing_ok=True)
    _log.warning("warning: %s is deleted, which a process left that was killed while it wrote", path)


def regular(path: Path, most: int | None = LARGEST) -> Path:
    """Return a path after checking that its file can be read to the end.

    Raises:
        FLError: if it is a device, a pipe or a folder (or a link to one), or has more than `most` bytes.
        FileNotFoundError: if there is no such file.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise FLError(f"{path} is no regular file (but a folder, a device or a pipe): put the file back", code="file")
    if most is not None and status.st_size > most:
        raise FLError(
            f"{path} has {status.st_size:,} bytes, more than a file of a run ever has: put the file back", code="file"
        )
    return path


@contextmanager
def private(folder: Path | None = None) -> Iterator[None]:
    """Within the block, let no other user read what this process makes.

    The same holds for processes that it starts, and for a folder, if given.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "keys"
    >>> with private(folder):
    ...     (folder / "key").touch()
    >>> oct(folder.stat().st_mode & 0o777), oct((folder / "key").stat().st_mode & 0o777)
    ('0o700', '0o600')
    """
    before = os.umask(0o077)
    try:
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
        yield
    finally:
        os.umask(before)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        temporary.write_text(text)


def write_json(path: Path, value: Mapping) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")
