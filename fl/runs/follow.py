"""What ranks other than 0 do in a run: the same rounds, without a run folder."""

from pathlib import Path

from fl import data
from fl.base.errors import Diverged
from fl.config import Config
from fl.models.own import Model
from fl.parallel import Stopped, current
from fl.runs import given
from fl.runs.assembly import build
from fl.runs.rounds import measured_round
from fl.runs.simulation import Simulation
from fl.runs.start import kept
from fl.runs.together import agreed, greet


def follow(
    config: Config, folder: Path, resume: bool, dataset: data.Dataset | None = None, model: Model | None = None
) -> dict:
    """Take part in the run that rank 0 carries out with the same arguments; returns its summary.

    Raises:
        Diverged: if training diverged.
        Stopped: if rank 0 goes no further.
        FLError: for a data set or a model that cannot be loaded here.
    """
    config = given.said(config, dataset, model)
    fed, algorithm = build(config, dataset, model, kept(folder, config) if resume else None)
    run = Simulation(config, fed, algorithm, folder, algorithm.init(), 0)
    try:
        greet(run)
        _rounds(run)
    except Stopped as stopped:
        if stopped.result is None:
            raise
        if "diverged" in stopped.result:
            raise Diverged(stopped.result["diverged"]) from None
        return stopped.result["summary"]


def _rounds(run: Simulation) -> None:
    """All rounds, until rank 0 stops."""
    with current().together():
        while True:
            run.server = agreed(run.server, run.done + 1)
            try:
                run.server, *_ = measured_round(run, run.done + 1)
            except Diverged:  # on all ranks alike: rank 0 says what becomes of the run
                current().exchange({})
            run.done += 1
