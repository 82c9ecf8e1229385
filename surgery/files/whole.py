"""Files and folders that are complete or absent."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from surgery.errors import SurgeryError


@contextmanager
def replacing(path: Path, *, folder: bool = False) -> Iterator[Path]:
    """A path beside the given one to write a file or a folder to, which takes its place when the block ends well.

    Otherwise it is deleted, and what was there stays. An OSError becomes a SurgeryError that names the path.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            if folder:
                temporary.mkdir()
            yield temporary
            for file in sorted(temporary.iterdir()) if folder else [temporary]:
                with open(file, "rb+") as written:
                    os.fsync(written.fileno())
            os.replace(temporary, path)
        finally:
            if temporary.is_dir():
                shutil.rmtree(temporary)
            else:
                temporary.unlink(missing_ok=True)
    except OSError as error:
        raise SurgeryError(f"{path} cannot be written: {error.strerror or error}") from None
