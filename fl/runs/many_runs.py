"""Several runs, one after another, each in its folder."""

import json
import logging
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from fl import data
from fl.base.console import program, quiet
from fl.base.errors import Diverged, Terminated
from fl.base.files import write_text
from fl.distributed import current
from fl.models.custom_model import Model
from fl.runs.lock import SETTINGS, is_unused, open_run_folder
from fl.runs.logs import require
from fl.runs.simulation import simulate
from fl.runs.state import RunState
from fl.settings import Config

_log = logging.getLogger("fl")


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """On Ctrl-C or SIGTERM in this block, say where results are and how to resume."""
    summary = folder / "summary.json"
    before = summary.stat().st_mtime_ns if summary.exists() else 0
    try:
        yield
    except KeyboardInterrupt as error:
        where = shlex.quote(str(folder))
        new = summary.exists() and summary.stat().st_mtime_ns != before
        if isinstance(error, Terminated) and new and json.loads(summary.read_text())["complete"]:
            print(f"\nstopped after the last round; the results are in {where}")
        elif not is_unused(folder):
            print(f"\nstopped; results so far are in {where}\ncontinue with:  {program('run')} --resume {where}")
        raise


@dataclass(frozen=True)
class Ended:
    """Outcome of several runs.

    Attributes:
        done: the folders of those that did all their rounds.
        failed: why training failed: of runs that diverged, which are not among `done`, and of those that ended with a
            loss that is not finite, which are.
    """

    done: list[Path] = field(default_factory=list)
    failed: dict[Path, str] = field(default_factory=dict)

    def describe(self) -> str:
        """List the runs that failed, a line for each; "" if none did."""
        lines = [f"{path}: {why}" for path, why in self.failed.items()]
        return "\n".join([f"\ntraining has failed in {len(lines)} of the runs:", *lines]) if lines else ""


def train_all(
    runs: Mapping[Path, Config],
    settings: Path,
    text: str,
    resume: bool,
    dataset: data.Dataset,
    model: Model | None = None,
) -> Ended:
    """Carry out several runs, each in its folder.

    Finished runs are kept, interrupted ones are resumed; if the training of one run fails, the others continue.

    Args:
        runs: the settings of the run in each folder.
        settings: the file that describes all of them, in the folder above theirs, which must be new unless `resume`.
        text: the content of that file.
        dataset: of all runs.
        model: the user's model, instead of the one in the settings.

    Raises:
        FLError: as `simulate` does, and if all runs diverge.
    """
    ended, leads = Ended(), current().rank == 0
    with open_run_folder(settings.parent, resume) if leads else nullcontext():
        if leads:
            for path, config in runs.items():  # an error in the last must come before the first trains
                _check(config, path, dataset, model)
            write_text(settings, text)
        for path, config in runs.items():
            try:
                failed = simulate(config, path, path.exists(), dataset, model).get("failed", "")
                ended.done.append(path)
            except Diverged as error:
                if len(ended.failed) == len(runs) - 1 and not ended.done:
                    raise
                _log.warning("warning: %s is left out: %s", path, error)
                failed = str(error)
            if failed:
                ended.failed[path] = failed
    return ended


def _check(config: Config, folder: Path, dataset: data.Dataset, model: Model | None) -> None:
    """Build a run and drop it, to refuse mistakes before the first run trains."""
    # It is built again when its turn comes, since all together may not fit into memory. Less than building would not
    # do: whether the data set can be partitioned with this seed, whether the model takes its samples, whether a
    # client's budget has an architecture, whether the weights of --init fit, and whether a folder's checkpoint is of
    # this run, are only known once that was tried.
    require(config.evaluation.log)
    if (folder / SETTINGS).exists():
        Config.read(folder, resume=True)  # which refuses settings that are gone
    with quiet("fl", "surgery"):
        RunState.prepare(config, folder, True, dataset, model)
