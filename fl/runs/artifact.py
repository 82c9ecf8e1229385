"""What a run leaves in its folder beside its tables, its settings, its summary and its checkpoint."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from fl.algorithms.algorithm import Algorithm, Server
from fl.config import Config
from fl.federation import Federation
from fl.runs.metrics import Row


class Snapshot(NamedTuple):
    """A run before its first round, or after its last one.

    Attributes:
        server: what the server keeps at that time.
        rows: of metrics.csv.
        folder: the run folder.
    """

    config: Config
    fed: Federation
    algorithm: Algorithm
    server: Server
    rows: Sequence[Row]
    folder: Path


@dataclass(frozen=True)
class Artifact:
    """What a run leaves, such as a figure. A file of `fl/runs`, `fl/analysis` or `fl/figures` that has one calls it
    ARTIFACT: that is all it takes to add one.

    Attributes:
        write: writes the file into the run folder, or does nothing for runs that it is not about.
        when: before the first round ("start"), or when training has ended, or was interrupted ("end").
    """

    write: Callable[[Snapshot], None]
    when: Literal["start", "end"] = "end"
