"""The logs of --log, which are told of each round."""

import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec

import yaml

from fl.base.errors import FLError
from fl.base.files import write_text
from fl.base.settings import choice
from fl.runs.metrics import Row
from fl.runs.state import RunState
from surgery.errors import first_line

_ID = "wandb-id.txt"


@contextmanager
def _tensorboard(run: RunState) -> Iterator[Callable[[Row], None]]:
    """Log columns as curves for `tensorboard --logdir FOLDER`.

    They lie in the folder `tensorboard` of the run folder. A resumed run continues them: the rounds that it repeats
    take the place of the former ones.
    """
    from torch.utils.tensorboard import SummaryWriter

    folder = run.folder / "tensorboard"
    new = not folder.exists()
    with SummaryWriter(folder, purge_step=run.done + 1) as writer:

        def tell(row: Row) -> None:
            for name, value in row.items():
                if name != "round":
                    writer.add_scalar(name, value, row["round"])

        if new:
            writer.add_text("settings", f"```yaml\n{run.config.to_yaml()}```")
            for row in run.rows:
                tell(row)
        yield tell


@contextmanager
def _wandb(run: RunState) -> Iterator[Callable[[Row], None]]:
    """Log settings and rounds to Weights & Biases.

    Its WANDB_... variables say where they go. A resumed run continues with its log, under the id in the run folder.

    Raises:
        FLError: if Weights & Biases cannot be reached.
    """
    import wandb

    id_file = run.folder / _ID
    new = not id_file.exists()
    if new:
        write_text(id_file, uuid.uuid4().hex[:12])
    try:
        log = wandb.init(
            project="layer-surgery",
            id=id_file.read_text(),
            name=run.folder.name,
            dir=run.folder,
            config=yaml.safe_load(run.config.to_yaml()),
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
    except wandb.Error as error:
        raise FLError(
            f"--log wandb: {first_line(error)}; `wandb login`, or set WANDB_MODE=offline", code="missing"
        ) from None
    with log:

        def tell(row: Row) -> None:
            log.log({name: value for name, value in row.items() if name != "round"}, step=row["round"])

        if new:
            for row in run.rows:
                tell(row)
        yield tell


LOGS: dict[str, Callable[[RunState], AbstractContextManager[Callable[[Row], None]]]] = {
    "tensorboard": _tensorboard,
    "wandb": _wandb,
}
"""From a name in --log to what opens that log: a run -> what is told of each round, until the log is closed."""


def require(names: Sequence[str]) -> None:
    """Raise FLError for an unknown log, and if the package of one of them is missing."""
    choice("log", names, LOGS)
    for package in names:
        spec = find_spec(package)
        if spec is None or spec.origin is None:  # without an origin it is just a folder of that name
            raise FLError(
                f"--log {package} needs a package that is missing: pip install 'layer-surgery[{package}]'",
                code="missing",
            )


@contextmanager
def open_logs(run: RunState) -> Iterator[Callable[[Row], None]]:
    """Open the logs, and yield a function that tells them of a row."""
    with ExitStack() as stack:
        logs = [stack.enter_context(LOGS[name](run)) for name in run.config.evaluation.log]

        def tell(row: Row) -> None:
            for log in logs:
                log(row)

        yield tell
