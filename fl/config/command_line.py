"""Settings from the command line: a recipe, flags, or a folder to resume."""

import difflib
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path

import tyro

from fl.base.checks import changed, role
from fl.base.errors import FLError
from fl.base.flags import written
from fl.config import Config
from fl.config.recipes import RECIPES, overview
from fl.config.recipes import describe as describe_recipe
from fl.config.yaml_settings import flat


def parse(
    argv: list[str],
    read: Callable[[Path], Config] = Config.read,
    prog: str = "python -m fl.run [RECIPE]",
    about: str = Config.__doc__,
    swept: str = "",
) -> tuple[Config, Path | None]:
    """(settings, folder to resume or None) from the command line.

    Args:
        read: the settings in the folder of a run to resume.
        prog, about: the command and its description, for --help.
        swept: the option that a sweep gives several values.

    Raises:
        FLError: for an unknown recipe, options that nothing reads, and settings that a resumed run cannot change.
    """
    start, recipe = Config(), argv and not argv[0].startswith("-")
    if recipe:
        name = argv.pop(0)
        if name not in RECIPES:
            near = difflib.get_close_matches(name, RECIPES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise FLError(f"unknown recipe {name!r}: {hint}python -m fl.run --help lists all {len(RECIPES)}")
        start, about = RECIPES[name](), f"{about}\n\n{describe_recipe(name)}"
    config = _cli(argv, start, prog, about)
    if config.resume is None:
        config.check_options(start, swept)
        return config, None
    if recipe:
        raise FLError("--resume takes the settings from the folder: leave the recipe out")
    folder = Path(config.resume)
    saved = read(folder)
    resumed = _cli(argv, replace(saved, resume=None), prog, about)
    different = [*changed(resumed, saved)]
    if fixed := [f.name for f in fields(Config) if f.name in different and not role(f).resumable]:
        was, now = (flat(asdict(config)) for config in (saved, resumed))
        flag = next(f for f in was if was[f] != now[f] and f.split(".")[0] == fixed[0].replace("_", "-"))
        raise FLError(f"--{flag} cannot change when a run is resumed (it had {written(was[flag])})")
    if "rounds" in different and resumed.lr_schedule != "constant":
        raise FLError(f"--rounds cannot change: --lr-schedule {resumed.lr_schedule} depends on the number of rounds")
    if "rounds" in different and (resumed.joining or resumed.leaving):
        raise FLError("--rounds cannot change: the rounds of --joining and --leaving were drawn among them")
    return resumed, folder


def _cli(argv: list[str], default: Config, prog: str, about: str) -> Config:
    return tyro.cli(
        Config,
        prog=prog,
        args=argv,
        default=default,
        description=f"{about}\n\nrecipes, to be overridden by flags (`NAME --help` describes one):\n{overview()}",
    )
