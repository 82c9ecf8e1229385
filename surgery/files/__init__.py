"""States in files: read piece by piece without running code, written whole or not."""

from surgery.files.reading import Checkpoint as Checkpoint
from surgery.files.reading import open_state as open_state
from surgery.files.whole import check_absent as check_absent
from surgery.files.writing import check_new as check_new
from surgery.files.writing import write as write
