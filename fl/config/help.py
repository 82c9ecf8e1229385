"""`--help` of the commands that take all settings of a run: those that the command at hand reads, or all of them."""

from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass
from typing import Any

from fl.algorithms import ALGORITHMS, is_mixed
from fl.base.checks import marks, unread
from fl.base.console import program
from fl.base.flags import Rare
from fl.base.help import Entry, Section, entries, page
from fl.config.config import Config
from fl.config.recipes import overview
from fl.data import is_text

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
    def shown(settings: Any, group: str = "") -> Callable[[Field], bool]:
        return lambda field: everything or not (marks(field, Rare) or unread(settings, field.name, group))

    title, under, groups = "", {}, []
    for field in fields(Config):
        title = _BEGIN.get(field.name, title)
        if is_dataclass(getattr(start, field.name)):
            groups.append(field)
        elif shown(config)(field):
            under.setdefault(title, []).append(field.name)
    flat = [
        Section(title, entries(start, shown=lambda field, names=names: field.name in names))
        for title, names in under.items()
    ]
    inner = [
        Section(_title(group.name), entries(getattr(start, group.name), group.name, shown(getattr(config, group.name))))
        for group in groups
        if everything or (_is_read(config, group.name) and shown(config)(group))
    ]
    return [*flat, *inner]


def _is_read(config: Config, group: str) -> bool:
    """Whether these settings read a group of settings: a method its own, text those of text."""
    if group == "text":
        return is_text(config.dataset)
    if group == "architectures":
        return any(map(is_mixed, config.algorithm))
    return group not in ALGORITHMS or group in config.algorithm


def _title(group: str) -> str:
    return f"{group}: options of the method" if group in ALGORITHMS else group
