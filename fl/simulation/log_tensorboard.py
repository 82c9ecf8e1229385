"""--log tensorboard: the columns of metrics.csv as curves for `tensorboard --logdir FOLDER`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fl.runs.metrics import Row
from fl.runs.simulation import Simulation


@contextmanager
def opened(run: Simulation) -> Iterator[Callable[[Row], None]]:
    """The log in the folder `tensorboard` of the run folder. A resumed run continues it: the rounds that it repeats
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
