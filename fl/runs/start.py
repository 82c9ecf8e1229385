"""start.safetensors: the trained weights that a run began with, so that resuming it does not need their file again."""

import logging

from fl.models.init import FILE
from fl.runs.artifact import Artifact
from fl.runs.simulation import Simulation

_log = logging.getLogger("fl")


def _leave(run: Simulation) -> None:
    start, path = run.fed.start, run.folder / FILE
    if start is not None and not path.exists():
        start.save(path)
        _log.warning(start.told())


ARTIFACT = Artifact(_leave, when="start")
