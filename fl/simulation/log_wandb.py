"""--log wandb: settings and rounds for Weights & Biases, whose WANDB_... variables say where they go."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import yaml

from fl.base.errors import FLError
from fl.base.files import write_text
from fl.runs.metrics import Row
from fl.runs.simulation import Simulation
from surgery.errors import first_line

_ID = "wandb-id.txt"


@contextmanager
def opened(run: Simulation) -> Iterator[Callable[[Row], None]]:
    """The log of the run. A resumed run continues it, under the id that is kept in the run folder.

    Raises:
        FLError: if Weights & Biases cannot be reached.
    """
    import wandb

    kept = run.folder / _ID
    new = not kept.exists()
    if new:
        write_text(kept, uuid.uuid4().hex[:12])
    try:
        log = wandb.init(
            project="layer-surgery",
            id=kept.read_text(),
            name=run.folder.name,
            dir=run.folder,
            config=yaml.safe_load(run.config.to_yaml()),
            resume="allow",
            settings=wandb.Settings(console="off"),
        )
    except wandb.Error as error:
        raise FLError(f"--log wandb: {first_line(error)}; `wandb login`, or set WANDB_MODE=offline") from None
    with log:

        def tell(row: Row) -> None:
            log.log({name: value for name, value in row.items() if name != "round"}, step=row["round"])

        if new:
            for row in run.rows:
                tell(row)
        yield tell
