"""What `--help` prints, laid out by argparse; tyro reads the command lines themselves."""

import argparse
import ast
import dataclasses
import inspect
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NoReturn, TypeVar, get_args

import tyro

from fl.algorithms import ALGORITHMS
from fl.base.console import as_called, program
from fl.base.settings import Flag, Rare, flag_in, flag_of, is_tuple, marks, options_of, settings_of
from fl.settings.config import Config, check_renamed
from fl.settings.recipes import overview

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


class _Layout(argparse.RawDescriptionHelpFormatter):
    """As wide as the terminal, up to where longer lines are hard to read; flags are not broken at their hyphens."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=26, width=_width())

    def _split_lines(self, text: str, width: int) -> list[str]:
        return _lines(text, width)


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
        groups = [field.name for field in dataclasses.fields(kind) if dataclasses.is_dataclass(_default(kind, field))]
        sections = {"arguments": entries(kind), **{group: entries(getattr(kind, group), group) for group in groups}}
        places = [word for word in sections["arguments"] if not word.startswith("-")]
        flags = ["[--FLAG VALUE ...]"] * (len(places) < len(sections["arguments"]))
        show(name, " ".join([*places, *flags]), inspect.getdoc(kind), sections)
    check_renamed(map(flag_in, argv))
    return tyro.cli(kind, prog=program(name), args=argv)


def show(name: str, usage: str, about: str, sections: dict[str, dict[str, str]], after: str = "") -> NoReturn:
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


def settings_page(name: str, usage: str, about: str, start: Config, config: Config, everything: bool) -> NoReturn:
    """Print the page of a command that takes all settings of a run, and end the program.

    Args:
        name: of the command. usage: what follows it.
        start: the defaults, which a recipe or a file may have set.
        config: the settings that the command line gives, which decide what else is read.
        everything: also show what these settings do not read, and what is seldom needed.
    """
    unread = {setting.flag for setting in settings_of(config) if setting.unread}

    def shown(field: dataclasses.Field, group: str = "") -> bool:
        return everything or not (marks(field, Rare) or flag_of(field.name, group) in unread)

    title, sections, groups = "", {}, {}
    for field in filter(shown, dataclasses.fields(Config)):
        if dataclasses.is_dataclass(group := getattr(start, field.name)):
            inner = [_entry(group, one, field.name) for one in dataclasses.fields(group) if shown(one, field.name)]
            groups[f"options of {field.name}" if field.name in ALGORITHMS else field.name] = dict(inner)
        else:
            title = _BEGIN.get(field.name, title)
            sections.setdefault(title, {}).update([_entry(start, field)])
    say, after = program(name), ""
    if not everything:
        after = (
            f"These are the usual settings, and those of {','.join(config.algorithm)}. `{say} --algorithm NAME --help` "
            f"shows those of another method, `{say} --help all` shows all settings. A recipe is named settings, which "
            f"flags override: `{program('run')} RECIPE --help` describes one."
        )
    sections |= {named: flags for named, flags in groups.items() if flags} | {"recipes": overview()}
    show(name, f"{usage} [--FLAG VALUE ...]", about, sections, after)


def entries(settings: Any, group: str = "") -> dict[str, str]:
    """The flags of a dataclass, or of its defaults, as they are written, and what they do; without those of the groups
    in it.

    Args:
        group: what the flags begin with.
    """
    plain = (one for one in dataclasses.fields(settings) if not dataclasses.is_dataclass(_default(settings, one)))
    return dict(_entry(settings, field, group) for field in plain)


@lru_cache
def documented(kind: type) -> dict[str, str]:
    """What the strings below the fields of a dataclass say of them, those of the classes that it is made from included.

    >>> from fl.base.settings import Limits
    >>> documented(Limits)
    {}
    """
    found: dict[str, str] = {}
    for cls in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
        except (OSError, TypeError):  # made by a program
            continue
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[field.target.id] = text.value.value
    return found


def _entry(settings: Any, field: dataclasses.Field, group: str = "") -> tuple[str, str]:
    """A flag as it is written, and what it does."""
    kind = settings if isinstance(settings, type) else type(settings)
    given = (mark.help for mark in marks(field, object) if getattr(mark, "help", None))
    said, default = next(given, documented(kind).get(field.name, "")), _default(settings, field)
    return _written(field, flag_of(field.name, group), default), f"{said} {_usual(field, default)}".strip()


def _default(settings: Any, field: dataclasses.Field) -> Any:
    return getattr(settings, field.name, dataclasses.MISSING)


def _is(field: dataclasses.Field, mark: Any) -> bool:
    return get_args(mark[int])[1] in marks(field, object)


def _written(field: dataclasses.Field, flag: str, default: Any) -> str:
    """`--rounds INT>=1`, `--flip, --no-flip` or `FOLDERS ...`."""
    kinds = options_of(field.type)
    word = next((mark.metavar for mark in marks(field, object) if getattr(mark, "metavar", None)), "")
    if _is(field, tyro.conf.Positional):
        word = (word or field.name.upper()) + " ..." * is_tuple(field.type)
        return word if default is dataclasses.MISSING else f"[{word}]"
    if kinds == (bool,):
        group, dot, name = flag.rpartition(".")
        return f"--{flag}" if _is(field, tyro.conf.FlagCreatePairsOff) else f"--{flag}, --{group}{dot}no-{name}"
    word = word or "|".join({str: "NAME"}.get(one, one.__name__.upper()) for one in kinds if one is not type(None))
    return f"--{flag} {word}".rstrip()


def _usual(field: dataclasses.Field, default: Any) -> str:
    """The default, where the text does not say it."""
    flags = marks(field, Flag)
    if default is dataclasses.MISSING or (default in (None, "", ()) and not flags):
        return ""
    if isinstance(default, bool):
        return "" if _is(field, tyro.conf.FlagCreatePairsOff) else f"(default: {'yes' if default else 'no'})"
    return f"(default: {' '.join(flags[0].str_from_instance(default)) if flags else default})"


def _width() -> int:
    return min(120, shutil.get_terminal_size().columns)


def _lines(text: str, width: int) -> list[str]:
    words = " ".join(text.split()).replace("(default: ", "(default:\0")  # which stays on one line
    lines = textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\0", " ") for line in lines]


def _paragraphs(text: str) -> str:
    """Paragraphs as lines; those that are indented are commands, and stay as they are."""
    paragraphs: Iterable[str] = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(one if one.startswith(" ") else "\n".join(_lines(one, _width())) for one in paragraphs)
