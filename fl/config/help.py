"""`--help` of the commands that take all settings of a run: those that the command at hand reads, or all of them."""

from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass

from fl.algorithms import ALGORITHMS
from fl.base.checks import flag_of, marks, settings_of
from fl.base.console import program
from fl.base.flags import Rare
from fl.base.help import Entry, Section, entries, page
from fl.config.config import Config
from fl.config.recipes import overview

_BEGIN = {
    "dataset": "data",
    "algorithm": "method and model",
    "participants": "training",
    "local_valid": "held-out samples",
    "seeds": "seeds and measurements",
    "device": "machine",
    "out": "run folder",
}
"""The setting that a section of the help begins with, and its heading."""


def settings_page(name: str, usage: str, about: str, start: Config, config: Config, everything: bool) -> str:
    """The page of a command.

    Args:
        name: of the command. usage: what follows it.
        start: the defaults, which a recipe or a file may have set.
        config: the settings that the command line gives, which decide what else is read.
        everything: also show what these settings do not read, and what is seldom needed.
    """
    sections = _sections(start, config, everything)
    recipes = Section("recipes", [Entry(recipe, text) for recipe, text in overview().items()])
    say = program(name)
    after = (
        ""
        if everything
        else (
            f"These are the usual settings, and those of {','.join(config.algorithm)}. `{say} --algorithm NAME --help` "
            f"shows those of another method, `{say} --help all` shows all settings. A recipe is named settings, which "
            f"flags override: `{program('run')} RECIPE --help` describes one."
        )
    )
    return page(f"{say} {usage} [--FLAG VALUE ...]", about, [*sections, recipes], after)


def _sections(start: Config, config: Config, everything: bool) -> list[Section]:
    unread = {setting.flag for setting in settings_of(config) if setting.unread}

    def shown(group: str = "") -> Callable[[Field], bool]:
        return lambda field: everything or not (marks(field, Rare) or flag_of(field.name, group) in unread)

    title, under, groups = "", {}, []
    for field in fields(Config):
        title = _BEGIN.get(field.name, title)
        if is_dataclass(getattr(start, field.name)):
            groups.append(field)
        elif shown()(field):
            under.setdefault(title, []).append(field.name)
    flat = [
        Section(title, entries(start, shown=lambda field, names=names: field.name in names))
        for title, names in under.items()
    ]
    inner = [
        Section(_title(group.name), entries(getattr(start, group.name), group.name, shown(group.name)))
        for group in groups
        if shown()(group)
    ]
    return [*flat, *inner]


def _title(group: str) -> str:
    return f"{group}: options of the method" if group in ALGORITHMS else group
