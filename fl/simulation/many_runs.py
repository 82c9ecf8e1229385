"""Several runs, one after another, each in its folder."""

import logging
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fl import data
from fl.base.errors import Diverged
from fl.base.files import write_text
from fl.config import Config
from fl.models.init import Start
from fl.runs.assembly import build
from fl.runs.folder import begin, create_folder
from fl.simulation.logs import require
from fl.simulation.one_run import simulate

_log = logging.getLogger("fl")


@contextmanager
def resumable(folder: Path, module: str) -> Iterator[None]:
    """On Ctrl-C inside this block, say where the results are and how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        if folder.exists():
            where = shlex.quote(str(folder))
            print(f"\nstopped; results so far are in {where}\ncontinue with:  python -m {module} --resume {where}")
        raise


def train_all(
    runs: Mapping[Path, Config], settings: Path, text: str, resume: bool, load: Callable[[Config], data.Dataset]
) -> list[Path]:
    """Carry out several runs, each in its folder. Finished runs are kept, interrupted ones are resumed; a run that
    diverges is logged and left out.

    Args:
        runs: the settings (with one method and one seed) of the run in each folder.
        settings: the file that describes all of them, in the folder above theirs, which must be new unless `resume`.
        text: the content of that file.
        load: loads the data set of a run.

    Returns:
        The folders of the runs that finished.

    Raises:
        FLError: as `simulate` does, and if all runs diverge.
    """
    if not resume and settings.parent.exists():
        create_folder(settings.parent)  # which raises the error
    for path, one in runs.items():  # an error in the last of them must come before the first trains
        require(one.log)
        dataset = load(one)
        fed, algorithm = build(one, dataset, Start.kept(path))
        begin(one, path, algorithm, fed.spec)
    if not resume:
        create_folder(settings.parent)
    write_text(settings, text)
    done = []
    for path, one in runs.items():
        try:
            simulate(replace(one, out=str(path.parent), name=path.name), path, resume=path.exists(), dataset=load(one))
            done.append(path)
        except Diverged as error:
            if path == [*runs][-1] and not done:
                raise
            _log.warning("warning: %s is left out: %s", path, error)
    return done
