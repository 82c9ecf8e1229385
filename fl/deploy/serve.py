"""A run whose clients are on other machines: rounds, run folder and checkpoint are those of a simulation."""

from dataclasses import replace
from pathlib import Path

from fl import data
from fl.base.errors import FLError
from fl.data import Dataset
from fl.deploy.nodes import Link, Waiting
from fl.deploy.remote import Remote
from fl.runs.one_run import simulate
from fl.settings import Config


def serve(link: Link, config: Config, folder: Path, test: Dataset, waiting: Waiting = Waiting()) -> dict:
    """Train with the nodes behind the link and leave a run folder, or go on with the run in it; return its summary.

    Args:
        config: with one algorithm and one seed; the number of clients is that of the nodes.
        test: the server's test set, see `fl.deploy.folders.read_server`.

    Raises:
        FLError: as `fl.simulate`, if too few nodes are there, or too few answer in a round.
    """
    if len(config.runs()) > 1:
        raise FLError("nodes train one method with one seed at a time: give one --algorithm and one of --seeds")
    config = replace(config, dataset=data.GIVEN, crop=config.crop, pool_test_set=False, pad=0, samples=0)
    remote = Remote(link, config, test, waiting)
    resume = (folder / "config.yaml").exists()
    return simulate(remote.config, folder, resume, remote.dataset, remote=remote)
