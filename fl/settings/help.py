"""Print the pages of `--help`, laid out by argparse; tyro reads command lines."""

import argparse
import dataclasses
import inspect
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

import tyro
from docstring_parser.attrdoc import AttributeDocstrings

from fl.algorithms import ALGORITHMS
from fl.base.console import as_called, program
from fl.base.errors import FLError
from fl.base.settings import Alternatives, Flag, Rare, choice, flag_in, flag_of, marks, one_of, types_of
from fl.settings.earlier import check_renamed
from fl.settings.experiment import Experiment
from fl.settings.flags import Command, Entry, entries, find_value, overridden, parse_command_line
from fl.settings.recipes import Recipe, overview

HELP = ("-h", "--help")
T = TypeVar("T")

_PAGE = {
    "data": ("data",),
    "method and model": ("algorithm", "model"),
    "clients": ("clients",),
    "training": ("rounds", "local"),
    "seeds and measurements": ("seeds", "evaluation"),
    "machine": ("execution",),
    "run folder": ("out", "name", "config", "resume"),
}
"""From the headings of the help to topics, and flags of the command."""


def is_asked(argv: Sequence[str]) -> bool:
    """Return whether a command line asks for help."""
    return any(word in HELP for word in argv)


def command(kind: type[T], name: str, argv: Sequence[str] | None) -> T:
    """Return the arguments of a command, a dataclass, from its command line.

    --help prints its page and ends the program.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Arguments:
    ...     size: int = 3
    >>> command(Arguments, "run", ["--size", "4"])
    Arguments(size=4)
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if is_asked(argv):
        sections = _arguments(kind)
        places = [word for word in sections["arguments"] if not word.startswith("-")]
        flags = ["[--FLAG VALUE ...]"] * (len(places) < len(sections["arguments"]))
        show(name, " ".join([*places, *flags]), inspect.getdoc(kind), sections)
    check_renamed(map(flag_in, argv))
    return parse_command_line(kind, argv, program(name))


def settings_page(argv: list[str], start: Experiment, about: str, recipes: Mapping[str, Recipe]) -> NoReturn:
    """Print the page of `fl.run`, and end the program.

    It lists the usual settings that a run with the rest of the command line would read. After `--help all` it lists
    every setting.

    Args:
        start: the defaults, which a recipe may have set.
        about: a description of the command.
        recipes: what its first word may be, which is listed.

    Raises FLError for a method that does not exist.
    """
    at = next(i for i, word in enumerate(argv) if word in HELP)
    everything = argv[at + 1 : at + 2] == ["all"]
    others = [word for word in argv[:at] + argv[at + 1 + everything :] if word not in HELP]
    experiment = start
    with suppress(FLError):  # whoever asks for help may have made a mistake
        if (file := find_value(others, "config")) is not None:
            experiment = start = Experiment.from_file(Path(file))
        experiment, _ = overridden(others, start)
    if asked_for := find_value(others, "algorithm"):
        choice("--algorithm", Experiment(algorithms=tuple(asked_for.split(","))).algorithms, ALGORITHMS, "METHOD")
    settings = [setting for run in experiment.runs() for setting in run.settings()]
    read = {setting.flag for setting in settings if not setting.unread and not marks(setting.field, Rare)}
    rare = {name for inside in entries(()).values() for name, entry in inside.items() if marks(entry.field, Rare)}
    hidden = {flag_of(name) for name in rare}
    shown = (lambda _: True) if everything else (lambda flag: flag in read and flag.partition(".")[0] not in hidden)
    page = _page(start, tuple(ALGORITHMS) if everything else experiment.algorithms, shown)
    say, after = program("run"), ""
    if not everything:
        after = (
            f"Also: `{say} --algorithm NAME --help` (other methods' options), `{say} RECIPE --help`, and all settings: "
            f"`{say} --help all`."
        )
    show("run", "[RECIPE] [--FLAG VALUE ...]", about, page | {"recipes": overview(recipes)}, after)


def every_setting() -> dict[str, dict[str, str]]:
    """Return what `--help all` shows, as `show` takes it.

    >>> every_setting()["run folder"]["--out FOLDER"]
    'folder in which run folders are made (default: runs)'
    """
    return _page(Experiment(), tuple(ALGORITHMS), lambda _: True)


def _page(start: Experiment, methods: Sequence[str], shown: Callable[[str], bool]) -> dict[str, dict[str, str]]:
    """Lay out the sections of the page of `fl.run`.

    Args:
        start: the defaults.
        methods: the methods whose options are listed.
        shown: flag of a setting -> whether it is listed.
    """
    values = {setting.flag: setting.value for run in reversed(start.runs()) for setting in run.settings()}
    values |= {"algorithm": start.algorithms, "seeds": start.seeds}
    command = {field.name: field for field in dataclasses.fields(Command)}
    topics, page, groups = entries(methods), {}, {}

    def lines(name: str, entry: Entry) -> dict[str, str]:
        default = entry.default
        if entry.group:
            options = [(field, flag_of(field.name, name)) for field in dataclasses.fields(default)]
            group = dict(
                _entry(type(default), field, flag, values.get(flag, getattr(default, field.name)))
                for field, flag in options
                if shown(flag)
            )
            title = f"options of {name}" if name in ALGORITHMS else name
            groups.update({title: group} if group else {})
            return {}
        if not shown(flag := flag_of(name)):
            return {}
        return dict([_entry(entry.owner or object, entry.field, flag, values.get(flag, default))])

    for heading, parts in _PAGE.items():
        page[heading] = section = {}
        for part in parts:
            if part in topics:
                for name, entry in topics[part].items():
                    section |= lines(name, entry)
            else:
                field = command[part]
                section |= [_entry(Command, field, flag_of(part), values.get(part, field.default))]
    for part in ("methods", "extensions"):
        for name, entry in topics[part].items():
            lines(name, entry)
    return {title: flags for title, flags in (page | groups).items() if flags}


def show(name: str, usage: str, about: str, sections: Mapping[str, Mapping[str, str]], after: str = "") -> NoReturn:
    """Print a page of help and end the program.

    Args:
        name: of the command. usage: what follows it.
        sections: from the title of each to its flags, as they are written, and what they do.
    """
    parser = argparse.ArgumentParser(
        usage=f"{program(name)} {usage}",
        description=_paragraphs(about),
        epilog=_paragraphs(after),
        add_help=False,
        formatter_class=_Layout,
    )
    for title, flags in sections.items():
        group = parser.add_argument_group(title)
        for written, text in flags.items():
            group.add_argument(dest=written, metavar=written, help=text.replace("%", "%%"))
    print(as_called(parser.format_help().rstrip()))
    raise SystemExit(0)


def _arguments(kind: type) -> dict[str, dict[str, str]]:
    """Lay out the page of a command from its dataclass.

    It has a section for it, and one for each group.
    """
    page: dict[str, dict[str, str]] = {"arguments": {}}
    for argument in dataclasses.fields(kind):
        if dataclasses.is_dataclass(group := argument.default):
            inside = [(option, getattr(group, option.name)) for option in dataclasses.fields(group)]
            page[argument.name] = dict(
                _entry(type(group), option, flag_of(option.name, argument.name), now) for option, now in inside
            )
        else:
            page["arguments"] |= [_entry(kind, argument, flag_of(argument.name), argument.default)]
    return page


@lru_cache
def _read_documentation(kind: type) -> dict[str, str]:
    """Return the strings below the fields of a dataclass, and of its base classes."""
    texts: dict[str, str] = {}
    for cls in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        with suppress(TypeError):  # classes made at run time have no source to read
            texts |= {name: text for name, (text, *_) in AttributeDocstrings().get_attr_docs(cls).items()}
    return texts


def _entry(kind: type, field: dataclasses.Field, flag: str, default: Any) -> tuple[str, str]:
    """Write a flag, as `--rounds INT>=1` or `--flip, --no-flip`, and what it does.

    The default is added unless it is empty.
    """
    helps = (mark.help for mark in marks(field, object) if getattr(mark, "help", None))
    owner, name = field.metadata.get("documented", (kind, field.name))
    text = next(helps, "") or _read_documentation(owner).get(name, "")
    if several := marks(field, Alternatives):
        return f"--{flag} {one_of(*several[0].options()).metavar}", f"{text} (default: {default})"
    kinds, many = types_of(field.type)
    parsed = marks(field, Flag)
    word = next((mark.metavar for mark in marks(field, object) if getattr(mark, "metavar", None)), "")
    usual = "" if default in (dataclasses.MISSING, None, "", ()) else default
    if _is(field, tyro.conf.Positional):
        written = (word or field.name.upper()) + " ..." * many
        written = written if default is dataclasses.MISSING else f"[{written}]"
    elif kinds == (bool,):
        single, (before, dot, name) = _is(field, tyro.conf.FlagCreatePairsOff), flag.rpartition(".")
        written = f"--{flag}" if single else f"--{flag}, --{before}{dot}no-{name}"
        usual = "" if single else "yes" if default else "no"
    else:
        names = [{str: "NAME"}.get(part, part.__name__.upper()) for part in kinds if part is not type(None)]
        written = f"--{flag} {word or '|'.join(names)}".rstrip()
    if parsed and default is not dataclasses.MISSING:
        usual = parsed[0].str_from_instance(default)[0]
    return written, f"{text} (default: {usual})" if usual != "" else text


def _is(field: dataclasses.Field, mark: Any) -> bool:
    return get_args(mark[int])[1] in marks(field, object)


class _Layout(argparse.RawDescriptionHelpFormatter):
    """As wide as the terminal, within limits; flags are not broken at hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=_width())

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _lines(text, width)


def _width() -> int:
    return min(120, shutil.get_terminal_size().columns)


def _lines(text: str, width: int) -> list[str]:
    def whole(part: re.Match[str]) -> str:  # it stays on one line, where it fits
        return part[0].replace(" ", "\0") if len(part[0]) < width else part[0]

    words = re.sub(r"`[^`]*`\S*|\(default: ", whole, " ".join(text.split()))
    lines = textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def _paragraphs(text: str) -> str:
    """Return paragraphs as lines; indented ones are commands, and stay as they are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(block if block.startswith(" ") else "\n".join(_lines(block, _width())) for block in paragraphs)
