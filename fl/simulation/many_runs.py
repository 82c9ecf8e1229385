"""Several runs, one after another, each in its folder."""

import logging
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from fl import data
from fl.base.console import program
from fl.base.errors import Diverged
from fl.base.files import write_text
from fl.config import Config
from fl.distributed import current
from fl.runs.assembly import build
from fl.runs.folder import SETTINGS, begin, held, is_unused
from fl.runs.kept_start import kept
from fl.simulation.logs import require
from fl.simulation.one_run import simulate

_log = logging.getLogger("fl")


@contextmanager
def resumable(folder: Path, command: str) -> Iterator[None]:
    """On Ctrl-C or SIGTERM inside this block, say where the results are and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        if not is_unused(folder):
            where = shlex.quote(str(folder))
            print(f"\nstopped; results so far are in {where}\ncontinue with:  {program(command)} --resume {where}")
        raise


@dataclass(frozen=True)
class Ended:
    """How several runs have ended.

    Attributes:
        done: the folders of those that did all their rounds.
        failed: why training failed: of runs that diverged, which are not among `done`, and of those that ended with a
            loss that is not finite, which are.
    """

    done: list[Path] = field(default_factory=list)
    failed: dict[Path, str] = field(default_factory=dict)

    def describe(self) -> str:
        """The runs that failed, a line for each.

        >>> print(Ended([], {Path("a"): "the loss is nan in round 4"}).describe())
        <BLANKLINE>
        training has failed in 1 of the runs:
        a: the loss is nan in round 4
        """
        if not self.failed:
            return ""
        lines = [f"{path}: {why}" for path, why in self.failed.items()]
        return "\n".join([f"\ntraining has failed in {len(lines)} of the runs:", *lines])


def train_all(
    runs: Mapping[Path, Config], settings: Path, text: str, resume: bool, load: Callable[[Config], data.Dataset]
) -> Ended:
    """Carry out several runs, each in its folder. Finished runs are kept, interrupted ones are resumed; after a run
    whose training fails the others go on.

    Args:
        runs: the settings (with one method and one seed) of the run in each folder.
        settings: the file that describes all of them, in the folder above theirs, which must be new unless `resume`.
        text: the content of that file.
        load: loads the data set of a run.

    Raises:
        FLError: as `simulate` does, and if all runs diverge.
    """
    ended, writes = Ended(), current().rank == 0
    with held(settings.parent, resume) if writes else nullcontext():
        for path, one in runs.items() if writes else ():  # an error in the last must come before the first trains
            require(one.log)
            dataset = load(one)
            fed, algorithm = build(one, dataset, start=kept(path, one))
            begin(one, path, algorithm, fed.spec)
        if writes:
            _tell_renamed(settings.parent, runs)
            write_text(settings, text)
        for path, one in runs.items():
            try:
                there, placed = path.exists(), replace(one, out=str(path.parent), name=path.name)
                summary = simulate(placed, path, resume=there, dataset=load(one))
                ended.done.append(path)
                if "failed" in summary:
                    ended.failed[path] = summary["failed"]
            except Diverged as error:
                if path == [*runs][-1] and not ended.done:
                    raise
                _log.warning("warning: %s is left out: %s", path, error)
                ended.failed[path] = str(error)
    return ended


def _tell_renamed(folder: Path, runs: Iterable[Path]) -> None:
    """Warn of runs that are trained anew beside others in the same folder that are none of these, but may have been."""
    new = [path for path in runs if not path.exists()]
    others = sorted({file.parent for file in folder.rglob(SETTINGS)} - {folder, *runs})
    if new and others:
        _log.warning(
            "warning: %s is trained anew, and %s is left alone: if it was renamed, stop here and give it its name back",
            ", ".join(path.name for path in new),
            ", ".join(map(str, others)),
        )
