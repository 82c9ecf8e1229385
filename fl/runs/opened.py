"""An open run folder: one process works in it, and leaves it ready to resume."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from fl import data
from fl.base.errors import Diverged, FLError, Unwritable
from fl.base.files import write_text
from fl.distributed import current
from fl.federation.transport import Transport
from fl.models.custom_model import Model
from fl.runs import lock
from fl.runs.assembly import check_config
from fl.runs.lock import SETTINGS, open_run_folder
from fl.runs.lockstep import check_ranks_agree
from fl.runs.logs import open_logs, require
from fl.runs.signals import terminable
from fl.runs.state import RunState
from fl.settings import Config

Draw: TypeAlias = Callable[[RunState], None]
"""Writes a figure or a table into a run folder, where the run is one for it."""


@contextmanager
def open_run(
    config: Config,
    folder: Path,
    resume: bool,
    dataset: data.Dataset | None,
    model: Model | None,
    transport: Transport,
    at_start: Sequence[Draw] = (),
    at_end: Sequence[Draw] = (),
    taken: Callable[[], None] = lambda: None,
) -> Iterator[RunState]:
    """Begin or resume a run in a folder; at the end of the block write what is kept.

    Only this process works in the folder meanwhile. However the block ends, the checkpoint of the last round, the
    summary and the figures are written.

    Args:
        taken: called once the folder is known to be this run's.

    Raises:
        FLError: as `fl.simulate` does.
    """
    check_config(config)
    require(config.evaluation.log)
    try:
        with open_run_folder(folder, resume), terminable() as ending:
            taken()
            if resume and (folder / SETTINGS).exists():
                Config.read(folder, resume=True)  # which refuses settings that are gone
            run = RunState.prepare(config, folder, resume, dataset, model, transport).begin(resume)
            run.ending = ending
            try:
                check_ranks_agree(run)
            except FLError:  # also where another rank is lost before the first round
                for path in () if resume else folder.iterdir():
                    if path.is_file() and path.name != lock.FILE:
                        path.unlink()
                raise
            for write in at_start:
                write(run)
            write_text(folder / SETTINGS, run.config.to_yaml())
            diverged = ""
            try:
                with open_logs(run) as run.log, current().together():
                    yield run
            except Diverged as error:
                diverged = str(error)
                raise
            finally:
                ending.saving = True
                run.close(diverged)
                for write in at_end:
                    write(run)
    except Unwritable as error:
        if not (folder / SETTINGS).exists():
            raise
        way = f"then continue with --resume {folder}, which loses no round of its checkpoint"
        raise FLError(f"{error}; {way}", code=error.code) from None
