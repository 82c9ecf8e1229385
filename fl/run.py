"""Train federated models: `python -m fl.run [RECIPE] [--flags]`."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from fl.analysis.groups import find_runs, group, make_table
from fl.base.console import guard
from fl.base.files import write_text
from fl.base.tables import fit_terminal
from fl.compare import compare
from fl.data import Dataset
from fl.distributed import current, join_ranks
from fl.runs.assembly import pick_device
from fl.runs.folder import name_new_folder, run_name
from fl.runs.many_runs import resumable, train_all
from fl.runs.simulation import simulate
from fl.runs.summary import advice, describe
from fl.settings import Experiment
from fl.settings.command_line import parse
from fl.settings.recipes import RECIPES, Recipe


def main(argv: Sequence[str] | None = None, recipes: Mapping[str, Recipe] = RECIPES) -> int:
    """Run every method and seed of the command line.

    If there are several, each has a folder within the command's, and one table and one figure compare them.

    Args:
        recipes: those whose name may be the first word.

    Returns:
        The exit code: 0, 1 if training failed, 2 for what cannot be run, 130 on Ctrl-C.
    """
    with guard() as ended, join_ranks():
        request = parse([*(sys.argv[1:] if argv is None else argv)], recipes)
        experiment, resume = request.experiment, request.resume is not None
        experiment.check()
        runs = experiment.runs()
        dataset, execution = runs[0].load(), runs[0].execution
        if execution.data_on != "host":
            dataset = dataset.to(pick_device(execution.device), execution.data_on)  # once for all runs
        folder = request.resume or name_new_folder(request.out, request.name, experiment.title())
        with resumable(folder):
            if len(runs) == 1:
                summary = simulate(runs[0], folder, resume, dataset)
                failed = "failed" in summary
                print(describe(summary))
            else:
                failed = _run_several(experiment, folder, resume, dataset)
        if not current().rank:
            print(advice(experiment, folder, request.recipe, request.start))
        ended.code = int(failed)
    return ended.code


def _run_several(experiment: Experiment, folder: Path, resume: bool, dataset: Dataset) -> bool:
    """Do the runs of an experiment and compare them. Returns whether one failed."""
    inside = {folder / run_name(config): config for config in experiment.runs()}
    ended = train_all(inside, folder / "config.yaml", experiment.to_yaml(), resume, dataset)
    if not current().rank:
        write_text(folder / "comparison.txt", compare(ended.done, folder / "comparison.png") + "\n")
        print(f"\n{make_table(group(find_runs(ended.done)), fit_terminal)}")
        if ended.failed:
            print(ended.describe())
    return bool(ended.failed)


if __name__ == "__main__":
    sys.exit(main())
