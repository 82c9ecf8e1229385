"""What `--help` prints: settings and what they do, in two columns as wide as the terminal."""

import ast
import dataclasses
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, get_args

import tyro

from fl.base.checks import flag_of, marks
from fl.base.console import as_called, program
from fl.base.flags import Flag
from fl.base.types import is_tuple, options_of

HELP = ("-h", "--help")
_WIDEST = 120  # longer lines are hard to read
_LEFT = 26
_MARKS = {mark: get_args(mark[int])[1] for mark in (tyro.conf.Positional, tyro.conf.FlagCreatePairsOff)}

Kind = TypeVar("Kind")


class Entry(NamedTuple):
    """A flag as it is written, and what it does."""

    flag: str
    text: str


class Section(NamedTuple):
    """Entries under a heading."""

    title: str
    entries: Sequence[Entry]


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
        sections = [Section("", entries(kind)), *(Section(g, entries(getattr(kind, g), g)) for g in groups)]
        places = " ".join(one.flag for one in sections[0].entries if not one.flag.startswith("-"))
        flags = "[--FLAG VALUE ...]" if any(one.flag.startswith("-") for one in sections[0].entries) else ""
        finish(page(f"{program(name)} {places} {flags}", inspect.getdoc(kind), sections))
    return tyro.cli(kind, prog=program(name), args=argv)


def finish(text: str) -> None:
    """Print a page of help and end the program."""
    print(as_called(text))
    raise SystemExit(0)


def page(usage: str, about: str, sections: Iterable[Section], after: str = "") -> str:
    """A page of help, wrapped to the terminal.

    >>> print(page("tool [--FLAG VALUE ...]", "Do it.", [Section("size", [Entry("--width INT", "how wide it is")])]))
    usage: tool [--FLAG VALUE ...]
    <BLANKLINE>
    Do it.
    <BLANKLINE>
    size
      --width INT             how wide it is
    """
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    parts = [f"usage: {' '.join(usage.split())}", _wrapped(about, width)]
    for title, lines in sections:
        if lines:
            head = [_heading(title)] if title else []
            parts.append("\n".join([*head, *(_columns(entry, width) for entry in lines)]))
    return "\n\n".join([*parts, *([_wrapped(after, width)] if after else [])])


def entries(settings: Any, group: str = "", shown: Callable[[dataclasses.Field], bool] = lambda _: True) -> list[Entry]:
    """The flags of a dataclass, or of its defaults, without those of the groups in it.

    Args:
        group: what the flags begin with.
        shown: which of its fields.
    """
    kind, result = settings if isinstance(settings, type) else type(settings), []
    for field in filter(shown, dataclasses.fields(kind)):
        if not dataclasses.is_dataclass(default := _default(settings, field)):
            flag, said = flag_of(field.name, group), documented(kind).get(field.name, "")
            given = next((mark.help for mark in marks(field, object) if getattr(mark, "help", None)), said)
            result.append(Entry(_written(field, flag, default), " ".join([*given.split(), _usual(field, default)])))
    return result


@lru_cache
def documented(kind: type) -> dict[str, str]:
    """What the strings below the fields of a dataclass say of them, those of the classes that it is made from included.

    >>> from fl.base.flags import Limits
    >>> documented(Limits)
    {}
    """
    found: dict[str, str] = {}
    for cls in reversed(kind.__mro__):
        if cls is object or "__dataclass_fields__" not in vars(cls):
            continue
        try:
            body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0].body
        except (OSError, TypeError):  # made by a program
            continue
        for field, text in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found[field.target.id] = text.value.value
    return found


def _default(settings: Any, field: dataclasses.Field) -> Any:
    return getattr(settings, field.name, dataclasses.MISSING)


def _is(field: dataclasses.Field, mark: Any) -> bool:
    return _MARKS[mark] in marks(field, object)


def _written(field: dataclasses.Field, flag: str, default: Any) -> str:
    """`--rounds INT>=1`, `--flip, --no-flip` or `FOLDERS`."""
    kinds = options_of(field.type)
    given = next((mark.metavar for mark in marks(field, object) if getattr(mark, "metavar", None)), "")
    if _is(field, tyro.conf.Positional):
        word = (given or field.name.upper()) + " ..." * is_tuple(field.type)
        return word if default is dataclasses.MISSING else f"[{word}]"
    if kinds == (bool,):
        group, _, name = flag.rpartition(".")
        dot = "." if group else ""
        return f"--{flag}" if _is(field, tyro.conf.FlagCreatePairsOff) else f"--{flag}, --{group}{dot}no-{name}"
    word = given or "|".join({str: "NAME"}.get(one, one.__name__.upper()) for one in kinds if one is not type(None))
    return f"--{flag} {word}".rstrip()


def _usual(field: dataclasses.Field, default: Any) -> str:
    """The default, where the text does not say it."""
    if default in (None, dataclasses.MISSING, "", ()) and not marks(field, Flag):
        return ""
    if default is False and _is(field, tyro.conf.FlagCreatePairsOff):
        return ""
    if isinstance(default, bool):
        default = "yes" if default else "no"
    words = marks(field, Flag)[0].str_from_instance(default) if marks(field, Flag) else [str(default)]
    return f"(default: {' '.join(words)})"


def _heading(title: str) -> str:
    bold = sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb" and "NO_COLOR" not in os.environ
    return f"\033[1m{title}\033[0m" if bold else title


def _wrapped(text: str, width: int) -> str:
    """Paragraphs as lines; those that are indented are commands, and stay as they are."""
    return "\n\n".join(
        paragraph.rstrip() if paragraph.startswith(" ") else _filled(paragraph, width)
        for paragraph in inspect.cleandoc(text).split("\n\n")
    )


def _filled(text: str, width: int) -> str:
    words = " ".join(text.split()).replace("(default: ", "(default:\0")  # which stays on one line
    return textwrap.fill(words, width, break_long_words=False, break_on_hyphens=False).replace("\0", " ")


def _columns(entry: Entry, width: int) -> str:
    first, indent = f"  {entry.flag}", " " * _LEFT
    text = textwrap.indent(_filled(entry.text, max(30, width - _LEFT)), indent) if entry.text.strip() else ""
    if not text:
        return first
    return f"{first}\n{text}" if len(first) > _LEFT - 2 else first.ljust(_LEFT) + text[_LEFT:]
