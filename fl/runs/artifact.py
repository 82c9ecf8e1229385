"""What a run leaves in its folder beside its tables, its settings, its summary and its checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from fl.runs.simulation import Simulation


@dataclass(frozen=True)
class Artifact:
    """What a run leaves, such as a figure. A file of `fl/runs`, `fl/analysis` or `fl/figures` that has one calls it
    ARTIFACT: that is all it takes to add one.

    Attributes:
        write: writes the file into the run folder, or does nothing for runs that it is not about.
        when: before the first round ("start"), or when training has ended, or was interrupted ("end").
    """

    write: Callable[[Simulation], None]
    when: Literal["start", "end"] = "end"
