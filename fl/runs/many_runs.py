"""Several runs, one after another or in processes side by side, each in its folder."""

import json
import logging
import shlex
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partialmethod
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, TypeAlias

import torch
from tqdm import tqdm

from fl import data
from fl.base.console import program, quiet
from fl.base.errors import Diverged, FLError, Terminated
from fl.base.files import write_text
from fl.distributed import current
from fl.models.custom_model import Model
from fl.runs.lock import SETTINGS, is_unused, open_run_folder
from fl.runs.logs import require
from fl.runs.one_run import simulate, terminable
from fl.runs.run import Run
from fl.settings import Config

_log = logging.getLogger("fl")


@contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """On Ctrl-C or SIGTERM inside this block, say where the results are and how to continue, if rounds are left."""
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
    load: Callable[[Config], data.Dataset],
    model: Model | None = None,
    jobs: int = 1,
) -> Ended:
    """Carry out several runs, each in its folder.

    Finished runs are kept, interrupted ones are resumed; after a run whose training fails the others go on.

    Args:
        runs: the settings (with one method and one seed) of the run in each folder.
        settings: the file that describes all of them, in the folder above theirs, which must be new unless `resume`.
        text: the content of that file.
        load: loads the data set of a run.
        model: a model of the user's own, in the place of that of the settings.
        jobs: how many at a time.

    Raises:
        FLError: as `simulate` does, and if all runs diverge.
    """
    if jobs > 1 and current().size > 1:
        raise FLError(f"--jobs {jobs} starts processes, and so does torchrun: take one of them")
    ended, leads = Ended(), current().rank == 0
    waits = terminable() if jobs > 1 else nullcontext()  # this process has to stop the others, as Ctrl-C does
    with open_run_folder(settings.parent, resume) if leads else nullcontext(), waits:
        if leads:
            for path, one in runs.items():  # an error in the last must come before the first trains
                _check(one, path, load, model)
            _warn_of_renamed(settings.parent, runs)
            write_text(settings, text)
        placed = {path: replace(one, out=str(path.parent), name=path.name) for path, one in runs.items()}
        for path, why in _side_by_side(placed, load, model, jobs) if jobs > 1 else _in_turn(placed, load, model):
            if isinstance(why, Diverged):
                if len(ended.failed) == len(runs) - 1 and not ended.done:
                    raise why
                _log.warning("warning: %s is left out: %s", path, why)
            else:
                ended.done.append(path)
            if why:
                ended.failed[path] = str(why)
    ended.done.sort(key=[*runs].index)
    return ended


_Outcome: TypeAlias = str | FLError
"""Why training has failed: a `Diverged`, or for a run that has ended what its summary says, "" if all is well."""


def _in_turn(
    runs: Mapping[Path, Config], load: Callable[[Config], data.Dataset], model: Model | None
) -> Iterator[tuple[Path, _Outcome]]:
    """Carry out runs one after another."""
    for path, one in runs.items():
        try:
            yield path, simulate(one, path, path.exists(), load(one), model).get("failed", "")
        except Diverged as error:
            yield path, error


def _side_by_side(
    runs: Mapping[Path, Config], load: Callable[[Config], data.Dataset], model: Model | None, jobs: int
) -> Iterator[tuple[Path, _Outcome]]:
    """Carry out runs in processes of their own, so many at a time; these save and end when this is closed.

    They share the memory of a data set on the CPU, and the CPU's threads.
    """
    context, left = torch.multiprocessing.get_context("spawn"), list(runs.items())
    threads = max(1, torch.get_num_threads() // jobs)
    going: dict[Any, tuple[Path, Any]] = {}
    try:
        with tqdm(total=len(runs), desc=f"{jobs} at a time", unit="run") as bar:
            while left or going:
                while left and len(going) < jobs:
                    path, one = left.pop(0)
                    mine, its = context.Pipe(duplex=False)
                    dataset = load(one).to(torch.device("cpu"))
                    process = context.Process(target=_train, args=(its, threads, one, path, dataset, model))
                    process.start()
                    going[mine] = path, process
                    its.close()
                for pipe in wait([*going]):
                    path, process = going.pop(pipe)
                    try:
                        said = pipe.recv()
                    except EOFError:
                        process.join()
                        reason = f"the process of {path} has ended with exit code {process.exitcode} and said nothing"
                        raise FLError(
                            f"{reason}: go on with --resume, and with fewer --jobs if memory was short"
                        ) from None
                    process.join()
                    if isinstance(said, FLError) and not isinstance(said, Diverged):
                        raise said
                    bar.update()
                    yield path, said
    finally:
        for _, process in going.values():
            process.terminate()  # by SIGTERM, at which a run saves
        for _, process in going.values():
            process.join()


def _train(pipe: Any, threads: int, config: Config, folder: Path, dataset: data.Dataset, model: Model | None) -> None:
    """Carry out a run in a process of its own, and tell how it has ended."""
    tqdm.__init__ = partialmethod(tqdm.__init__, disable=True)  # type: ignore[method-assign]
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal tells all processes: one word is enough, of who started it
    torch.set_num_threads(threads)
    with suppress(KeyboardInterrupt):  # the process that has started this one says so
        try:
            said: _Outcome = simulate(config, folder, folder.exists(), dataset, model).get("failed", "")
        except FLError as error:
            said = error
        pipe.send(said)


def _check(config: Config, folder: Path, load: Callable[[Config], data.Dataset], model: Model | None) -> None:
    """Build a run and drop it, so that what is wrong with it is refused before the first run trains."""
    # It is built again when its turn comes, since all together may not fit into memory. Less than building would not
    # do: whether the data set can be dealt out with this seed, whether the model takes its samples, whether a client's
    # budget has an architecture, whether the weights of --init fit and whether a folder's checkpoint is of this run are
    # only known once that was tried.
    require(config.log)
    dataset = load(config)
    with quiet("fl", "surgery"):
        Run.prepare(config, folder, True, dataset, model)


def _warn_of_renamed(folder: Path, runs: Mapping[Path, Config]) -> None:
    """Warn of runs that are trained anew beside others in the same folder that are none of these, but may have been."""
    new = [path for path in runs if not path.exists()]
    others = sorted({file.parent for file in folder.rglob(SETTINGS)} - {folder, *runs})
    if new and others:
        _log.warning(
            "warning: %s is trained anew, and %s is left alone: if it was renamed, stop here and give it its name back",
            ", ".join(path.name for path in new),
            ", ".join(map(str, others)),
        )
