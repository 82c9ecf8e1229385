"""Operate on models and checkpoints: `python -m surgery`; alone it lists commands."""

import difflib
import inspect
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout, suppress
from functools import partial, wraps
from io import StringIO
from pathlib import Path
from typing import ParamSpec, TypeVar

from surgery import __version__
from surgery.arguments import parse
from surgery.errors import SurgeryError, is_out_of_memory

P = ParamSpec("P")
T = TypeVar("T")

_OVERVIEW = """\
usage: python -m surgery COMMAND ...

Look at models, and operate on them and on checkpoints.

commands:
{commands}

examples:
  python -m surgery inspect torchvision:resnet50
  python -m surgery inspect timm:resnet50 --width 0.5 --plot resnet50.png
  python -m surgery narrow a.pt --model timm:resnet18 --width 0.5 --out b.pt
  python -m surgery merge ties a.pt b.pt --base base.pt --out c.pt

`python -m surgery COMMAND --help` lists all options of a command."""


def spell_command(text: str) -> str:
    """Return a text in which this command is called as the user called it."""
    return (
        text.replace("python -m surgery", "layer-surgery surgery")
        if Path(sys.argv[0]).stem == "layer-surgery"
        else text
    )


def run(name: str, arguments: Sequence[str]) -> int | None:
    """Run a command with the arguments that follow its name, and return its exit code."""
    import tyro  # these take long

    from surgery.commands import COMMANDS
    from surgery.commands.merge import help_of

    if name in ("-h", "--help"):
        first = {name: (inspect.getdoc(command) or "").splitlines()[0] for name, command in COMMANDS.items()}
        lines = [f"  {name:9}{text[0].lower()}{text[1:].rstrip('.')}" for name, text in first.items()]
        print(spell_command(_OVERVIEW.format(commands="\n".join(lines))))
    elif name == "--version":
        print(f"layer-surgery {__version__}")
    elif name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(COMMANDS)}"
        raise SurgeryError(f"unknown command {name!r}: {hint}", code="name")
    elif name == "merge" and arguments[1:] in (["--help"], ["-h"]):
        print(spell_command(help_of(arguments[0])))
    elif {"-h", "--help"} & set(arguments):
        with redirect_stdout(StringIO()) as page, suppress(SystemExit):  # no terminal: lines instead of boxes
            tyro.cli(COMMANDS[name], prog=spell_command(f"python -m surgery {name}"), args=["--help"])
        print(lay_out(page.getvalue()))
    else:
        return parse(_postpone(COMMANDS[name]), arguments, spell_command(f"python -m surgery {name}"))()
    return 0


def _postpone(command: Callable[P, T]) -> Callable[P, Callable[[], T]]:
    """Return a function with the signature of a command that returns the call of it."""

    @wraps(command)
    def postponed(*args: P.args, **kwargs: P.kwargs) -> Callable[[], T]:
        return partial(command, *args, **kwargs)

    return postponed


def lay_out(page: str) -> str:
    """Lay out a page of tyro as other commands' pages, with a colon behind headings.

    >>> print(lay_out("usage: cut [-h] [OPTIONS] FILE\\n\\n options\\n ------- \\n  -h, --help  show\\n  --seed INT"))
    usage: cut FILE [--FLAG VALUE ...]
    <BLANKLINE>
    options:
      --seed INT
    """
    page = re.sub(r" \[-h\] \[OPTIONS\](.*)", r"\1 [--FLAG VALUE ...]", page, count=1)
    page = re.sub(r"^  -h, --help .*\n", "", page, flags=re.MULTILINE)
    page = re.sub(r"^ (?:positional )?(.+?) *\n -+ *$", r"\1:", page, flags=re.MULTILINE)
    return "\n".join(map(str.rstrip, page.rstrip().splitlines()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the command's exit code, or 2 if it cannot run."""
    name, *arguments = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leaves nothing half written
    code = None
    try:
        code = run(name, arguments)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has read enough; discard what Python still flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (SurgeryError, OSError) as error:
        print(spell_command(f"error: {error}"), file=sys.stderr)
        return 2
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print("error: out of memory: give a smaller model or a smaller --input", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return code or 0


if __name__ == "__main__":
    sys.exit(main())
