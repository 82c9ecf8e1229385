"""States in files: read piece by piece without running code that a file may hold, written whole or not at all."""

from surgery.files.reading import Checkpoint, open_state
from surgery.files.whole import check_absent
from surgery.files.writing import check_new, write

__all__ = ["Checkpoint", "check_absent", "check_new", "open_state", "write"]
