"""Settings from the command line: a recipe, a file, flags, or a folder to resume."""

import difflib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, fields, replace
from pathlib import Path

import tyro

from fl.base.checks import changed, role
from fl.base.console import program
from fl.base.errors import FLError
from fl.base.flags import written
from fl.base.help import HELP, asked, finish
from fl.config import Config
from fl.config.checks import check_methods, check_registered
from fl.config.held_out import holding_out
from fl.config.help import settings_page
from fl.config.recipes import RECIPES
from fl.config.recipes import describe as describe_recipe
from fl.config.yaml_settings import flat


def parse(
    argv: list[str],
    read: Callable[[Path], Config] = Config.read,
    command: str = "run",
    usage: str = "[RECIPE]",
    about: str = Config.__doc__,
    swept: str = "",
) -> tuple[Config, Path | None]:
    """(settings, folder to resume or None) from the command line.

    Args:
        read: the settings in the folder of a run to resume.
        command: its name. usage, about: what follows the name, and a description, for --help.
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
            raise FLError(f"unknown recipe {name!r}: {hint}{program('run')} --help lists all {len(RECIPES)}")
        start, about = RECIPES[name](), f"{about}\n\n{describe_recipe(name)}"
    if asked(argv):
        finish(_help(argv, start, command, usage, about))
    config = _cli(argv, start, command)
    if config.config is not None:
        if recipe or config.resume is not None:
            other = "a recipe" if recipe else "--resume"
            raise FLError(f"--config and {other} both say where the settings come from: leave one of them out")
        start = Config.from_file(Path(config.config))
        config = replace(_cli(argv, start, command), config=None)
    if config.resume is None:
        config.check_options(start, swept)
        chosen = any(word.replace("_", "-").split("=")[0] == "--local-valid" for word in argv)
        return config if swept == "local-valid" else holding_out(config, chosen), None
    if recipe:
        raise FLError("--resume takes the settings from the folder: leave the recipe out")
    folder = Path(config.resume)
    saved = read(folder)
    check_registered(saved, folder)
    resumed = _cli(argv, replace(saved, resume=None), command)
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


def _cli(argv: Sequence[str], default: Config, command: str) -> Config:
    return tyro.cli(Config, prog=program(command), args=argv, default=default)


def _help(argv: list[str], start: Config, command: str, usage: str, about: str) -> str:
    """The page for the settings that the other words of the command line give; for the defaults if they give none.

    Raises FLError for a method that does not exist.
    """
    at = next(i for i, word in enumerate(argv) if word in HELP)
    everything = argv[at + 1 : at + 2] == ["all"]
    others = [word for word in argv[:at] + argv[at + 1 + everything :] if word not in HELP]
    config = start
    with suppress(SystemExit, FLError):  # whoever asks for help may have made a mistake
        config = tyro.cli(Config, args=others, default=start, console_outputs=False)
        if config.config is not None:
            start = Config.from_file(Path(config.config))
            config = tyro.cli(Config, args=others, default=start, console_outputs=False)
    check_methods(config)  # whose options the page shows
    return settings_page(command, usage, about, start, config, everything)
