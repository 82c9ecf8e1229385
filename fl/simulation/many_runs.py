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
from fl.runs.assembly import build
from fl.runs.folder import begin, create_folder
from fl.simulation.one_run import simulate

_log = logging.getLogger("fl")


@contextmanager
def resumable(folder: Path, module: str) -> Iterator[None]:
    """Ctrl-C within says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if folder.exists():
            where = shlex.quote(str(folder))
            print(f"\nstopped; what is done is in {where}\ngo on with:  python -m {module} --resume {where}")
        raise


def train_all(
    runs: Mapping[Path, Config], settings: Path, text: str, resume: bool, load: Callable[[Config], data.Dataset]
) -> list[Path]:
    """Run all of several runs, each in its folder; those that are done, or begun, are taken up where they are.

    One that diverges is told and left out, and the others go on.

    Args:
        runs: folder -> settings with one method and one seed.
        settings: the file that says what all of them are, in the folder above them, which is new unless `resume`.
        text: its content.
        load: the data set of a run.

    Returns:
        The folders of those that came to their end.

    Raises:
        FLError: as `simulate`, and if all diverged.
    """
    if not resume and settings.parent.exists():
        create_folder(settings.parent)  # which says so
    for path, one in runs.items():  # what the last of them refuses is told before the first trains
        dataset = load(one)
        fed, algorithm = build(one, dataset)
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
