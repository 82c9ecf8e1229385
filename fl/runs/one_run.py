"""From settings to a trained model: run the rounds, measure, keep the run folder up to date."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from fl import data
from fl.base.errors import Diverged, FLError, Terminated, Unwritable
from fl.base.files import write_text
from fl.distributed import current, joined
from fl.federation.clients import RemoteClients
from fl.models.custom_model import Model
from fl.runs import lock
from fl.runs.assembly import build, resolve_inputs
from fl.runs.folder import load_initial_weights
from fl.runs.lock import SETTINGS, open_run_folder
from fl.runs.logs import OnRound, require, watched
from fl.runs.run import Run, check_ranks_agree, measured_round, rounds, sync_server
from fl.settings import Config


# Figures are imported where they are drawn: matplotlib takes 0.7 s, and a node of `fl.deploy` starts for each message.
def _draw_at_start(run: Run) -> None:
    from fl.figures.coverage import leave_coverage

    leave_coverage(run)


def _draw_at_end(run: Run) -> None:
    from fl.figures.clients import leave_structure
    from fl.figures.curves import leave_curves

    leave_structure(run)
    leave_curves(run)


AT_START = [_draw_at_start]
AT_END = [_draw_at_end]
"""What writes figures and tables into a run folder, where the run is one for them, before the first round, and when
training has ended or was interrupted. A line here is all that another one takes."""


def simulate(
    config: Config,
    folder: str | Path,
    resume: bool = False,
    dataset: data.Dataset | None = None,
    model: Model | None = None,
    on_round: OnRound | None = None,
    remote: RemoteClients | None = None,
) -> dict:
    """Run all rounds of one method with one seed and leave a run folder; return its summary.

    The folder holds config.yaml, metrics.csv (a row a round), curves.png, checkpoint.safetensors and summary.json.
    Where clients hold samples out it also holds clients.csv, a row a client and evaluated round with its scores;
    methods with models on levels leave structure.json and structure.png, those with clients of different architectures
    architectures.csv and (where these keep their places) coverage.png.

    A run that was interrupted at any moment is continued with `resume`, and ends as it would have without the
    interruption: bit for bit on a CPU with the same backend and as many threads, on a GPU as far as its kernels are
    deterministic.

    Under torchrun every process calls this with the same arguments: the first writes the folder, and all return the
    summary.

    Args:
        config: with one algorithm and one seed.
        folder: must be new or empty, unless the run in it is resumed.
        dataset: data of your own, such as `fl.Dataset.from_arrays(...)`, in the place of `config.dataset`; or the
            settings' data set, as `config.load()` returns it, so that several runs load it once.
        model: a model of your own, in the place of `config.model`: an `nn.Module`, whose weights are the initial ones,
            or a function that makes one, see `fl.build`. The checkpoint keeps which data and which model its
            run needs; give the same to resume it.
        on_round: called after each round with its row of metrics.csv, a dict of plain numbers. If it returns True, the
            run stops there; `resume` goes on with the next round.
        remote: clients on other machines, who train there (see `fl.deploy`); None: they are simulated.

    Raises:
        FLError: if the folder has something in it (or, resuming, holds no run of these data, model and method), another
            process works in it, it cannot be written to, or training diverges.
        KeyboardInterrupt: on Ctrl-C and on SIGTERM, after what is done was saved. A handler of SIGTERM of your own
            runs before.
    """
    with joined() as ranks:
        if remote and ranks.size > 1:
            raise FLError("clients on other machines train there: start one process, without torchrun")
        if ranks.rank:
            return _follow(config, Path(folder), resume, dataset, model)
        return _lead(config, Path(folder), resume, dataset, model, on_round, remote)


def _lead(
    config: Config,
    folder: Path,
    resume: bool,
    dataset: data.Dataset | None,
    model: Model | None,
    on_round: OnRound | None,
    remote: RemoteClients | None,
) -> dict:
    require(config.log, on_round)
    try:
        with open_run_folder(folder, resume), _terminable() as saving:
            run = Run.begin(config, folder, resume, dataset, model, remote)
            try:
                check_ranks_agree(run)
            except FLError:  # also where another rank is lost before the first round
                for one in () if resume else folder.iterdir():
                    if one.is_file() and one.name != lock.FILE:
                        one.unlink()
                raise
            for write in AT_START:
                write(run)
            write_text(folder / SETTINGS, run.config.to_yaml())
            diverged = ""
            try:
                with watched(run, on_round) as stop, current().together():
                    for number in rounds(run):
                        if number % config.checkpoint_every == 0:
                            run.save()
                        if stop(run.rows[-1]):
                            break
            except Diverged as error:
                diverged = str(error)
                raise
            finally:
                saving()
                summary = run.close(diverged)
                for write in AT_END:
                    write(run)
            sync_server(run, summary)
            return summary
    except Unwritable as error:
        if not (folder / SETTINGS).exists():
            raise
        raise FLError(f"{error}; then go on with --resume {folder}, which loses no round of its checkpoint") from None


def _follow(config: Config, folder: Path, resume: bool, dataset: data.Dataset | None, model: Model | None) -> dict:
    """Do the rounds of a rank other than 0, which writes no run folder, until rank 0 ends the run."""
    config = resolve_inputs(config, dataset, model)
    fed, algorithm = build(config, dataset, model, load_initial_weights(folder, config) if resume else None)
    run = Run(config, fed, algorithm, folder, algorithm.init(), 0)
    check_ranks_agree(run)
    with current().together():
        while (summary := sync_server(run)) is None:
            run.done += 1
            run.server, *_ = measured_round(run, run.done)
    return summary


@contextmanager
def _terminable() -> Iterator[Callable[[], None]]:
    """Raise `Terminated` in the block on SIGTERM, after a handler of the user's was called; a second one is ignored.

    Once what is yielded was called it does so only at the end: torchrun sends it where another rank has died, and then
    this one has to save. It does so in the main thread alone, which is the one that signals reach, and where SIGTERM is
    not ignored.
    """
    main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM) if main else None
    if before in (None, signal.SIG_IGN):
        yield lambda: None
        return
    told, saving = [], []

    def ended(number: int, frame: FrameType | None) -> None:
        told.append(number)
        if callable(before):
            before(number, frame)
        if len(told) == 1 and not saving:
            raise Terminated

    signal.signal(signal.SIGTERM, ended)
    try:
        yield lambda: saving.append(True)
    finally:
        signal.signal(signal.SIGTERM, before)
    if told:
        raise Terminated
