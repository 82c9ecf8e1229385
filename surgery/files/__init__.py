"""States in files: read in pieces without running code, written whole or not at all."""

from surgery.files.reading import Checkpoint as Checkpoint
from surgery.files.reading import open_state as open_state
from surgery.files.whole import check_absent as check_absent
from surgery.files.writing import check_new as check_new
from surgery.files.writing import write as write
