"""Settings from the command line: a recipe, a file, flags, or a folder to resume."""

import difflib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fl.base.errors import FLError
from fl.base.settings import flag_in, write_value
from fl.engine.optimizers import SCHEDULES
from fl.partition import KINDS
from fl.settings import Config, Experiment
from fl.settings.config import RESUMABLE
from fl.settings.earlier import check_renamed
from fl.settings.extensions import EXTENSIONS
from fl.settings.flags import Command, find_value, overridden
from fl.settings.help import is_asked, settings_page
from fl.settings.recipes import RECIPES, Recipe
from fl.settings.recipes import describe as describe_recipe

_log = logging.getLogger("fl")


@dataclass(frozen=True)
class Request:
    """The runs that a command line asks for.

    Attributes:
        experiment: the runs.
        out, name: where the folder of the runs is made, and its name; None: one that the settings make.
        resume: the folder in which they resume.
        recipe, start: the recipe's name, "" without one, and the settings that the flags change.
    """

    experiment: Experiment
    out: str = Command.out
    name: str | None = None
    resume: Path | None = None
    recipe: str = ""
    start: Experiment = Experiment()

    def one_run(self) -> Config:
        """Return the settings of the run. Raises FLError if there are several."""
        runs = self.experiment.runs()
        if len(runs) > 1:
            raise FLError("nodes train one method with one seed at a time: give one --algorithm and one of --seeds")
        return runs[0]


def parse(argv: list[str], recipes: Mapping[str, Recipe] = RECIPES) -> Request:
    """Parse the command line of a run.

    Args:
        recipes: those whose name may be the first word.

    Raises:
        FLError: for an unknown recipe, options that nothing reads, and settings that a resumed run cannot change.
    """
    start, recipe = Experiment(), argv.pop(0) if argv and not argv[0].startswith("-") else ""
    about = "Simulate federated learning; without flags FedMR on handwritten digits."
    if recipe:
        if recipe not in recipes:
            near = difflib.get_close_matches(recipe, recipes, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise FLError(
                f"unknown recipe {recipe!r}: {hint}there are {', '.join(recipes)}; the papers' are in a checkout, "
                "`python -m benchmarks.papers NAME`",
                code="name",
            )
        start, about = recipes[recipe](), f"{about}\n\n{describe_recipe(recipes[recipe])}"
    if is_asked(argv):
        settings_page(argv, start, about, {} if recipe else recipes)
    flags = {flag_in(word) for word in argv}
    check_renamed(flags)
    file, folder = find_value(argv, "config"), find_value(argv, "resume")
    if file is not None or folder is not None:
        others = [source for source, there in (("a recipe", recipe), ("--config", file), ("--resume", folder)) if there]
        if len(others) > 1:
            raise FLError(f"{' and '.join(others)} both say where the settings come from: leave one of them out")
        start = Experiment.from_file(Path(file)) if file is not None else Experiment.read(Path(folder or ""), True)
    experiment, values = overridden(argv, start)
    if folder is not None:
        for config in start.runs():
            config.check_registered(Path(folder))
        _check_resumed(start, experiment, flags, Path(folder))
        return Request(experiment, resume=Path(folder))
    for config in experiment.runs():
        config.check_values()
        for setting in config.settings():
            if setting.unread and setting.flag in flags:
                raise FLError(setting.unread)
    if file is not None:
        _warn_of_unread(file, start, experiment)
    experiment = experiment.as_read().with_validation("local-valid" in flags)
    return Request(experiment, values.out, values.name, recipe=recipe, start=start if recipe else Experiment())


def _check_resumed(saved: Experiment, resumed: Experiment, flags: set[str], folder: Path) -> None:
    """Raise FLError for a flag that changes what a resumed run cannot change."""
    for flag, before, after in (
        ("algorithm", saved.algorithms, resumed.algorithms),
        ("seeds", saved.seeds, resumed.seeds),
    ):
        if before != after:
            raise FLError(f"--{flag} cannot change when a run is resumed (it had {write_value(before)})", code="folder")
    for flag in sorted(flags & {"out", "name"}):
        raise FLError(f"--{flag} cannot change when a run is resumed (it lies in {folder})", code="folder")
    for before, after in zip(saved.runs(), resumed.runs()):
        were = {setting.flag: setting.value for setting in before.settings()}
        for setting in after.settings():
            changed = setting.value != were.get(setting.flag, setting.field.default)
            if changed and setting.name not in RESUMABLE:
                raise FLError(
                    f"--{setting.flag} cannot change when a run is resumed (it had "
                    f"{write_value(were.get(setting.flag, setting.field.default))})",
                    code="folder",
                )
            if setting.unread and setting.flag in flags:
                raise FLError(setting.unread)
        if before.rounds == after.rounds:
            continue
        if SCHEDULES[after.local.lr_schedule]:
            raise FLError(
                f"--rounds cannot change: --lr-schedule {after.local.lr_schedule} depends on the number of rounds",
                code="folder",
            )
        if after.fixes_rounds:
            name = next(name for name, options in after.extensions.items() if EXTENSIONS[name].fixes_rounds(options))
            raise FLError(
                f"--rounds cannot change: what --{name} does in which round was drawn among them", code="folder"
            )


def _warn_of_unread(file: str, start: Experiment, experiment: Experiment) -> None:
    """Say which settings of a file no run reads.

    Args:
        start: as the file has it. experiment: with the flags beside the file.
    """
    reasons = [setting.unread for run in experiment.runs()[:1] for setting in run.list_changed() if setting.unread]
    before, after = start.config.data.partition, experiment.config.data.partition
    if before.name != after.name and before.options not in (after.options, KINDS[before.name].options):
        reasons.append(f"it has options of --partition {before.name}, not of {after.name}")
    for name in experiment.options.keys() - set(experiment.algorithms):
        reasons.append(f"{name} is not in --algorithm {','.join(experiment.algorithms)}")
    for reason in reasons:
        _log.warning("warning: %s has a setting that is ignored: %s", file, reason)
