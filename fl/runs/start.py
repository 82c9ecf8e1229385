"""start.safetensors: the trained weights that a run began with, so that resuming it does not need their file again."""

import logging

from fl.runs.artifact import Artifact
from fl.runs.kept_start import FILE, keep
from fl.runs.simulation import Simulation

_log = logging.getLogger("fl")


def _leave(run: Simulation) -> None:
    start = run.fed.start
    if start is not None and not (run.folder / FILE).exists():
        keep(run.folder, start)
        _log.warning(start.told())


ARTIFACT = Artifact(_leave, when="start")
