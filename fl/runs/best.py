"""best.safetensors: the model of the best evaluated round, beside the checkpoint of the last one."""

import json
import os
from pathlib import Path

from safetensors import SafetensorError, safe_open

from fl.algorithms.algorithm import Server
from fl.base.errors import FLError
from fl.runs import checkpoint, metrics
from fl.runs.checksums import of_file
from surgery import State
from surgery.errors import first_line
from surgery.transfer import host_copies
from zoo import Spec

FILE = "best.safetensors"
_NEXT = ".best.next.safetensors"


class BestModel:
    """The best model so far, on its way into the run folder.

    The file changes only together with the checkpoint, so that it is never of a round that a killed run has to repeat:
    the new one is written beside it before the checkpoint, and takes its place after it.

    Args:
        folder: of the run.
        done: the round of its checkpoint.

    Attributes:
        checksum: of the file that belongs to the next checkpoint; "" for none.
    """

    def __init__(self, folder: Path, done: int) -> None:
        self.folder, self.checksum = folder, of_file(_kept(folder, done))
        self._taken: tuple[Server, int, State] | None = None
        if _kept(folder, done).name == _NEXT:
            self.commit()
        (folder / _NEXT).unlink(missing_ok=True)

    def take(self, server: Server, round: int, statistics: State) -> None:
        """Remember the parts of a server; they are written with the next checkpoint."""
        parts = checkpoint.flatten(server)
        copies = dict(zip(parts, host_copies(list(parts.values()))))
        self._taken = checkpoint.unflatten(copies), round, statistics

    def prepare(self, spec: Spec) -> None:
        """Write what was taken since the last checkpoint, under another name."""
        if self._taken is not None:
            server, round, statistics = self._taken
            checkpoint.save(self.folder, server, round, spec, statistics, file=_NEXT)
            self.checksum = of_file(self.folder / _NEXT)
            self._taken = None

    def commit(self) -> None:
        """Give it its name, now that the checkpoint is written."""
        if (self.folder / _NEXT).exists():
            os.replace(self.folder / _NEXT, self.folder / FILE)


def best_file(folder: Path) -> str:
    """The file of a run folder with the model of its best evaluated round, which may be the last.

    Raises FLError if it was not kept.
    """
    done = _round(folder / checkpoint.FILE)
    best = metrics.best([row for row in metrics.read(folder / "metrics.csv") if row["round"] <= done])
    if not best:
        raise FLError(f"{folder} has no best round: none was evaluated before its checkpoint")
    for file in (checkpoint.FILE, FILE, _NEXT):
        if (folder / file).exists() and _round(folder / file) == best["round"]:
            return file
    raise FLError(f"{folder} has not kept the model of its best round, {best['round']}: train with --keep-best")


def check_kept(folder: Path, done: int, known: str | None) -> None:
    """Raise FLError unless the best model is the one that was there when the checkpoint of round `done` was written.

    Args:
        known: its checksum; None for a checkpoint of an earlier version, which has none.
    """
    found = of_file(path := _kept(folder, done))
    if known is None or found == known:
        return
    if not known:
        raise FLError(f"{folder / FILE} is not of this run, which has kept no best model: move it away")
    way_out = "put back a copy of the file, or start a new run under another --name"
    raise FLError(f"{path} is {'not the model that the run has kept' if found else 'gone'}: {way_out}")


def _kept(folder: Path, done: int) -> Path:
    """The file of the best model, which after a kill around a checkpoint may have its name of before."""
    return folder / (_NEXT if (folder / _NEXT).exists() and _round(folder / _NEXT) <= done else FILE)


def _round(path: Path) -> int:
    try:
        if path.exists() and not path.is_file():
            raise ValueError("it is a folder, a device or a pipe")
        with safe_open(path, framework="pt") as file:
            found = json.loads((file.metadata() or {}).get("state", "{}")).get("round")
        if type(found) is not int:
            raise ValueError(f"its header says round {found!r}")
        return found
    except FileNotFoundError:
        raise FLError(f"{path.parent} has no {path.name}") from None
    except (SafetensorError, OSError, AttributeError, ValueError) as error:
        way_out = "put back a copy of the file, or train again"
        if path.name == _NEXT:
            way_out = "delete it, and the run goes on without it"
        raise FLError(f"{path} cannot be read ({first_line(error)}): {way_out}") from None
