"""What `--help` prints, laid out by argparse; tyro reads the command lines themselves."""

import argparse
import dataclasses
import inspect
import io
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

import tyro
from docstring_parser.attrdoc import AttributeDocstrings

from fl.algorithms import ALGORITHMS
from fl.base.console import as_called, program
from fl.base.errors import FLError
from fl.base.settings import Flag, Rare, choice, flag_in, flag_of, marks, settings_of, types_of
from fl.settings.config import Config, check_renamed
from fl.settings.recipes import Recipe, overview

HELP = ("-h", "--help")
Kind = TypeVar("Kind")

_BEGIN = {
    "dataset": "data",
    "algorithm": "method and model",
    "participation": "training",
    "local_valid": "held-out samples",
    "seeds": "seeds and measurements",
    "device": "machine",
    "out": "run folder",
}
"""The setting that a section of the help begins with, and its heading."""


def asked(argv: Sequence[str]) -> bool:
    """Whether a command line asks for help."""
    return any(word in HELP for word in argv)


def command(kind: type[Kind], name: str, argv: Sequence[str] | None) -> Kind:
    """The arguments of a command, a dataclass, from its command line; --help prints its page and ends the program.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Arguments:
    ...     size: int = 3
    >>> command(Arguments, "run", ["--size", "4"])
    Arguments(size=4)
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if asked(argv):
        sections = _sections(kind)
        places = [word for word in sections["arguments"] if not word.startswith("-")]
        flags = ["[--FLAG VALUE ...]"] * (len(places) < len(sections["arguments"]))
        show(name, " ".join([*places, *flags]), inspect.getdoc(kind), sections)
    check_renamed(map(flag_in, argv))
    return parsed(kind, argv, prog=program(name))


def parsed(kind: type[Kind], argv: Sequence[str], quiet: bool = False, **options: Any) -> Kind:
    """Parse a command line with tyro. Flags are described by docstrings.

    Comments at fields are not looked for, since tyro would read the source of nearly every class for them.

    Args:
        quiet: whether nothing is said of a mistake, which ends the program.
    """
    if quiet:  # tyro's console_outputs=False is not: it still tells of values that a flag does not take
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            return parsed(kind, argv, **options)
    return tyro.cli(kind, args=argv, config=(tyro.conf.HelptextFromCommentsOff,), **options)


def settings_page(argv: list[str], start: Config, about: str, recipes: Mapping[str, Recipe]) -> NoReturn:
    """Print the page of `fl.run`, and end the program.

    It has the usual settings, of which those that the command line's other words give decide what else is read; after
    `--help all` every one.

    Args:
        start: the defaults, which a recipe may have set.
        about: a description of the command.
        recipes: what its first word may be, which is listed.

    Raises FLError for a method that does not exist.
    """
    at = next(i for i, word in enumerate(argv) if word in HELP)
    everything = argv[at + 1 : at + 2] == ["all"]
    others = [word for word in argv[:at] + argv[at + 1 + everything :] if word not in HELP]
    config = start
    with suppress(SystemExit, FLError):  # whoever asks for help may have made a mistake
        config = parsed(Config, others, default=start, quiet=True)
        if config.config is not None:
            start = Config.from_file(Path(config.config))
            config = parsed(Config, others, default=start, quiet=True)
    choice("--algorithm", config.algorithm, ALGORITHMS)
    hidden = {one.flag for one in settings_of(config) if one.unread or marks(one.field, Rare)}
    hidden |= {flag_of(field.name) for field in dataclasses.fields(Config) if marks(field, Rare)}  # groups, too
    sections = _sections(start, lambda flag: everything or flag not in hidden, _BEGIN) | {"recipes": overview(recipes)}
    say, after = program("run"), ""
    if not everything:
        after = (
            f"These are the usual settings, and those of {','.join(config.algorithm)}. `{say} --algorithm NAME --help` "
            f"shows those of another method, `{say} --help all` shows all settings. A recipe is named settings, which "
            f"flags override: `{say} RECIPE --help` describes one."
        )
    show("run", "[RECIPE] [--FLAG VALUE ...]", about, sections, after)


def every_setting() -> dict[str, dict[str, str]]:
    """What `--help all` shows, as `show` takes it.

    >>> every_setting()["run folder"]["--out FOLDER"]
    'folder in which run folders are made (default: runs)'
    """
    return _sections(Config(), begin=_BEGIN)


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


def _sections(
    settings: Any, shown: Callable[[str], bool] = lambda _: True, begin: Mapping[str, str] | None = None
) -> dict[str, dict[str, str]]:
    """The sections of a page, as `show` takes them: those of a dataclass, or of its defaults, that `begin` at some of
    its fields, and one for each group in it.
    """
    title, sections, groups = "arguments", {}, {}
    for field in dataclasses.fields(settings):
        title = (begin or {}).get(field.name, title)
        value = getattr(settings, field.name, dataclasses.MISSING)
        if not shown(flag_of(field.name)):
            continue
        if dataclasses.is_dataclass(value):
            name = f"options of {field.name}" if field.name in ALGORITHMS else field.name
            inner = [one for one in dataclasses.fields(value) if shown(flag_of(one.name, field.name))]
            groups[name] = dict(_entry(value, one, field.name) for one in inner)
        else:
            sections.setdefault(title, {}).update([_entry(settings, field)])
    return sections | {name: flags for name, flags in groups.items() if flags}


@lru_cache
def _documented(kind: type) -> dict[str, str]:
    """What the strings below the fields of a dataclass say of them, those of its base classes included."""
    found: dict[str, str] = {}
    for cls in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        with suppress(TypeError):  # made by a program
            found |= {name: text for name, (text, *_) in AttributeDocstrings().get_attr_docs(cls).items()}
    return found


def _entry(settings: Any, field: dataclasses.Field, group: str = "") -> tuple[str, str]:
    """A flag as it is written, `--rounds INT>=1`, `--flip, --no-flip` or `FOLDERS ...`; and what it does, with its
    default where the text does not say it.
    """
    default = getattr(settings, field.name, dataclasses.MISSING)
    kinds, many = types_of(field.type)
    flag, parsed = flag_of(field.name, group), marks(field, Flag)
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
        names = [{str: "NAME"}.get(one, one.__name__.upper()) for one in kinds if one is not type(None)]
        written = f"--{flag} {word or '|'.join(names)}".rstrip()
    if parsed and default is not dataclasses.MISSING:
        usual = parsed[0].str_from_instance(default)[0]
    given = (mark.help for mark in marks(field, object) if getattr(mark, "help", None))
    kind = settings if isinstance(settings, type) else type(settings)
    text = next(given, _documented(kind).get(field.name, ""))
    return written, f"{text} (default: {usual})" if usual != "" else text


def _is(field: dataclasses.Field, mark: Any) -> bool:
    return get_args(mark[int])[1] in marks(field, object)


class _Layout(argparse.RawDescriptionHelpFormatter):
    """As wide as the terminal, up to where longer lines are hard to read; flags are not broken at their hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=_width())

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _lines(text, width)


def _width() -> int:
    return min(120, shutil.get_terminal_size().columns)


def _lines(text: str, width: int) -> list[str]:
    words = " ".join(text.split()).replace("(default: ", "(default:\0")  # which stays on one line
    lines = textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def _paragraphs(text: str) -> str:
    """Paragraphs as lines; those that are indented are commands, and stay as they are."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(one if one.startswith(" ") else "\n".join(_lines(one, _width())) for one in paragraphs)
