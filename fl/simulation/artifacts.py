"""All that a run leaves in its folder beside what training itself needs."""

from typing import Literal

from fl.base.plugins import declared
from fl.runs.artifact import Artifact
from fl.runs.simulation import Simulation

ARTIFACTS: dict[str, Artifact] = {
    f"{room}.{name}": artifact
    for room, found in (
        ("runs", declared("fl.runs", "ARTIFACT", Artifact)),
        ("analysis", declared("fl.analysis", "ARTIFACT", Artifact)),
        ("figures", declared("fl.figures", "ARTIFACT", Artifact)),
    )
    for name, artifact in found.items()
}
"""From room and file to what the file declares."""


def leave(when: Literal["start", "end"], run: Simulation) -> None:
    """Write the artifacts that are due."""
    for artifact in ARTIFACTS.values():
        if artifact.when == when:
            artifact.write(run)
