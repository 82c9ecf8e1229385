"""What watches a run from round to round: the user's function, and the logs of --log."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from importlib.util import find_spec
from typing import TypeAlias

import numpy as np

from fl.base.errors import FLError
from fl.runs.metrics import Row
from fl.runs.simulation import Simulation
from fl.simulation import log_tensorboard, log_wandb

OnRound: TypeAlias = Callable[[Row], bool | None]
"""A row of metrics.csv -> whether the run is to stop after it."""

LOGS: dict[str, Callable[[Simulation], AbstractContextManager[Callable[[Row], None]]]] = {
    "tensorboard": log_tensorboard.opened,
    "wandb": log_wandb.opened,
}
"""From a name in --log to what opens that log: a run -> what is told of each round, until the log is closed."""


def require(names: Sequence[str], on_round: OnRound | None = None) -> None:
    """Raise FLError if the package of one of these logs is missing, or `on_round` cannot be called."""
    if on_round is not None and not callable(on_round):
        raise FLError(f"on_round={on_round!r}: give a function of a row of metrics")
    for package in names:
        found = find_spec(package)
        if found is None or found.origin is None:  # without an origin it is just a folder of that name
            raise FLError(f"--log {package} needs a package that is missing: pip install 'layer-surgery[{package}]'")


@contextmanager
def watched(run: Simulation, on_round: OnRound | None = None) -> Iterator[Callable[[Row], bool]]:
    """Within it, a function that tells everyone about a row, and returns whether the user wants to stop."""
    with ExitStack() as stack:
        logs = [stack.enter_context(LOGS[name](run)) for name in run.config.log]

        def tell(row: Row) -> bool:
            for log in logs:
                log(row)
            said = on_round(dict(row)) if on_round else False
            return isinstance(said, bool | np.bool_) and bool(said)  # and not for whatever else it may return

        yield tell
