"""A command line from a function: its annotated signature gives the flags, its docstring the texts of --help."""

import inspect
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from typing import Annotated, Any, Literal, get_args, get_origin

import docstring_parser
import tyro

from surgery.operations.arguments import type_and_kind


def call(command: Callable[..., Any], prog: str, argv: Sequence[str]) -> Any:
    """What a command gives for the arguments that follow its name.

    Raises:
        SystemExit: for --help, and for arguments that it does not take.
    """
    explained = vars(command).get("explained", lambda first: None)  # what --help prints after a first argument
    if {"-h", "--help"} & set(argv) and (text := explained(argv[0])):
        print(text.format(module=prog.rpartition(" ")[0]))
        raise SystemExit(0)
    texts = texts_of(command)
    parameters = inspect.signature(command).parameters

    def read(**given: Any) -> dict[str, Any]:
        return given

    read.__annotations__ = {name: _as_tyro_reads(p, texts[name]) for name, p in parameters.items()}
    taken = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=p.default,
            annotation=read.__annotations__[name],
        )
        for name, p in parameters.items()
    ]
    vars(read)["__signature__"] = inspect.Signature(taken)
    about = docstring_parser.parse(command.__doc__)
    description = "\n\n".join(filter(None, (about.short_description, about.long_description)))
    with redirect_stdout(_Wrapped(sys.stdout)):
        given = tyro.cli(read, prog=prog, description=description, args=argv)
    return command(**given)


class _Wrapped:
    """A stream on which prose is wrapped: tyro wraps what stands in its boxes, and leaves descriptions in one line."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        columns = min(shutil.get_terminal_size().columns, 80)
        lines = text.split("\n")
        for i, line in enumerate(lines):
            if line[:1].isalpha() and not line.startswith("usage:"):
                lines[i] = textwrap.fill(line, columns)
        return self._stream.write("\n".join(lines))


def texts_of(function: Callable[..., Any]) -> dict[str, str]:
    """What a docstring says of each argument, and of what is returned, in one line each.

    >>> texts_of(call)
    {}
    """
    found = docstring_parser.parse(function.__doc__)
    texts = {one.arg_name: one.description for one in found.params}
    if found.returns is not None:
        texts["return"] = found.returns.description
    return {name: " ".join(text.split()) for name, text in texts.items()}


def _as_tyro_reads(parameter: inspect.Parameter, text: str) -> Any:
    """The annotation of an argument in tyro's terms."""
    kind, known = type_and_kind(parameter.annotation)
    several, metavar, markers = get_origin(kind) is tuple and not known.by, known.metavar, []
    if get_origin(kind) is Literal:
        metavar = f"{{{','.join(get_args(kind))}}}"
    if known.positional:
        markers.append(tyro.conf.Positional)
    if known.repeated:
        kind = tuple[str, ...]
        markers.append(tyro.conf.UseAppendAction)
    if kind is bool:
        markers.append(tyro.conf.FlagCreatePairsOff)
    if known.by:
        markers.append(known.by)
    hint = None
    if parameter.default is None or parameter.default is False:  # "default: None" says nothing
        text, bracket, default = text.partition(" [")
        hint = f"[{default}" if bracket else ""
    elif parameter.default is parameter.empty and (known.repeated or (several and known.positional)):
        hint = "(required)"
    read = kind if parameter.default is not None or known.repeated else kind | None
    settings = tyro.conf.arg(metavar=metavar, help=text, help_behavior_hint=hint)
    return Annotated[read, settings, *markers]
