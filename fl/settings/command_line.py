"""Settings from the command line: a recipe, a file, flags, or a folder to resume."""

import difflib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fl.base.console import program
from fl.base.errors import FLError
from fl.base.settings import changed, check_read, check_values, flag_in, settings_of, without_unread, written
from fl.engine.optimizers import SCHEDULES
from fl.settings import Config
from fl.settings.config import check_renamed
from fl.settings.help import asked, parsed, settings_page
from fl.settings.recipes import RECIPES, Recipe
from fl.settings.recipes import describe as describe_recipe

_log = logging.getLogger("fl")


def parse(argv: list[str], recipes: Mapping[str, Recipe] = RECIPES) -> tuple[Config, Path | None]:
    """Parse the command line of a run. Return the settings, and the folder to resume or None.

    Args:
        recipes: those whose name may be the first word.

    Raises:
        FLError: for an unknown recipe, options that nothing reads, and settings that a resumed run cannot change.
    """
    start, about, recipe = Config(), Config.__doc__, argv and not argv[0].startswith("-")
    if recipe:
        name = argv.pop(0)
        if name not in recipes:
            near = difflib.get_close_matches(name, recipes, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise FLError(
                f"unknown recipe {name!r}: {hint}there are {', '.join(recipes)}; the papers' are in a checkout, "
                "`python -m benchmarks.papers NAME`"
            )
        start, about = recipes[name](), f"{about}\n\n{describe_recipe(recipes[name])}"
    if asked(argv):
        settings_page(argv, start, about, {} if recipe else recipes)
    given, file = {flag_in(word) for word in argv}, None
    check_renamed(given)
    config = _cli(argv, start)
    if config.config is not None:
        if recipe or config.resume is not None:
            other = "a recipe" if recipe else "--resume"
            raise FLError(f"--config and {other} both say where the settings come from: leave one of them out")
        file = Path(config.config)
        start = Config.from_file(file)
        config = replace(_cli(argv, start), config=None)
    if config.resume is not None:
        if recipe:
            raise FLError("--resume takes the settings from the folder: leave the recipe out")
        folder = Path(config.resume)
        return _resumed(argv, folder, Config.read(folder, resume=True)), folder
    check_values(config)
    check_read(config, given)
    for one in changed(start, Config()) if file else ():
        if reason := next(now.unread for now in settings_of(config) if now.flag == one.flag):
            _log.warning("warning: %s has a setting that is ignored: %s", file, reason)
    return without_unread(config).holding_out("local-valid" in given), None


def _resumed(argv: list[str], folder: Path, saved: Config) -> Config:
    """The settings of a run that goes on, of which flags may change some."""
    saved.check_registered(folder)
    resumed = _cli(argv, replace(saved, resume=None))
    different = {setting.flag: setting for setting in changed(saved, resumed)}
    for flag, was in different.items():
        if not was.role.resumable:
            raise FLError(f"--{flag} cannot change when a run is resumed (it had {written(was.value)})")
    check_read(resumed, {flag_in(word) for word in argv})
    if "rounds" in different and SCHEDULES[resumed.lr_schedule]:
        raise FLError(f"--rounds cannot change: --lr-schedule {resumed.lr_schedule} depends on the number of rounds")
    for name, one in resumed.extensions().items() if "rounds" in different else ():
        if one.fixes_rounds(getattr(resumed, name)):
            raise FLError(f"--rounds cannot change: what --{name} does in which round was drawn among them")
    return resumed


def _cli(argv: Sequence[str], default: Config) -> Config:
    given = {*map(flag_in, argv)}
    if "participants" in given and "participation" not in given:  # a number overrides the share of a recipe or a file
        default = replace(default, participation=0.0)
    return parsed(Config, argv, prog=program("run"), default=default)
