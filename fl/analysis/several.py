"""Several runs from Python, and their results as tables of text and of pandas."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from fl import data
from fl.analysis.groups import RecordedRun, find_runs, group, make_table, summarise_run
from fl.base.errors import FLError
from fl.distributed import join_ranks
from fl.models.custom_model import Model
from fl.runs.assembly import complete_settings, pick_device
from fl.runs.folder import run_name
from fl.runs.lock import SETTINGS
from fl.runs.many_runs import Ended, train_all
from fl.settings import Experiment


@dataclass(frozen=True)
class Results:
    """The results of runs; `print` gives the table of `python -m fl.compare`.

    The tables of pandas need `pip install 'layer-surgery[pandas]'`. Runs that differ in their seed alone have the same
    `method`, which also names the settings in which others differ, as in "fedavg lr=0.1".

    Attributes:
        runs: each with its folder, its settings and its rows of metrics.csv.
        failed: why training failed, by folder: of runs that diverged, which are not among `runs`, and of those that
            ended with a loss that is not finite, which are.
    """

    runs: Sequence[RecordedRun]
    failed: Mapping[Path, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return make_table(group(self.runs)) + Ended(failed={**self.failed}).describe()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f'<pre style="overflow-x: auto">{escape(str(self))}</pre>'

    def frame(self) -> Any:
        """Return a DataFrame with a row for each run.

        It has method, seed, results of `fl.analysis.groups.summarise_run`, folder.
        """
        rows = [{**name, **summarise_run(run), "folder": str(run.folder)} for name, run in self._label()]
        frame = _pandas().DataFrame(rows)
        return frame[[*(name for name in frame if name != "folder"), "folder"]]

    def means(self) -> Any:
        """Return a DataFrame with a row for each method.

        It has the mean and sample standard deviation over seeds of each result. Its columns are pairs, such as
        ("accuracy", "std"), which is NaN for a single seed.
        """
        results = self.frame().drop(columns=["seed", "folder"])
        return results.groupby("method", sort=False).agg(["mean", "std"])

    def rounds(self) -> Any:
        """Return a DataFrame with a row for each round of each run.

        It has method, seed, and the columns of metrics.csv.
        """
        return _pandas().DataFrame([{**name, **row} for name, run in self._label() for row in run.rows])

    def _label(self) -> list[tuple[dict[str, Any], RecordedRun]]:
        """Return the first columns of a run's rows, and the run."""
        labels = group(self.runs).items()
        return [({"method": label, "seed": run.config.seed}, run) for label, runs in labels for run in runs]


def results(*folders: str | Path) -> Results:
    """Read the runs of folders, which are run folders or hold some.

    Runs that were not evaluated yet are left out with a warning.

    Raises FLError for a folder without runs, and if none was evaluated yet.
    """
    return Results(find_runs([Path(folder) for folder in folders]))


def simulate_all(
    experiment: Experiment,
    folder: str | Path,
    resume: bool = False,
    dataset: data.Dataset | None = None,
    model: Model | None = None,
) -> Results | None:
    """Run every method with every seed of an experiment, and return the results.

    Each has a run folder within the given one, as from `python -m fl.run --algorithm A,B --seeds 0,1`, and `python -m
    fl.compare FOLDER` draws them in one figure. The data set is loaded once. What is wrong with any of the runs is
    refused before the first trains; if the training of one fails, the others continue.

    Args:
        experiment: the methods, the seeds, and what they have in common.
        folder: must be new or empty, unless its runs are resumed: finished ones are kept, the others continue.
        dataset, model: of your own, as in `simulate`.

    Returns:
        None on other ranks than the first, under torchrun.

    Raises:
        FLError: as `simulate` does, and if training fails in all runs.
    """
    folder = Path(folder)
    with join_ranks() as ranks:
        if not isinstance(experiment, Experiment):
            raise FLError(f"simulate_all takes an fl.Experiment, got {type(experiment).__name__}: a Config is one run")
        common = complete_settings(experiment.config, dataset, model)
        experiment = replace(experiment, config=common).with_validation()
        experiment.check()
        loaded = (common.load() if dataset is None else dataset).to(pick_device(common.execution.device))
        inside = {folder / run_name(config): config for config in experiment.runs()}
        ended = train_all(inside, folder / SETTINGS, experiment.to_yaml(), resume, loaded, model)
        return None if ranks.rank else Results(find_runs(ended.done), ended.failed)


def _pandas() -> Any:
    with suppress(ImportError):
        import pandas

        return pandas
    raise FLError(
        "a table of pandas needs a package that is missing: pip install 'layer-surgery[pandas]', or print the results",
        code="missing",
    )
