"""End command lines with an exit code and, for what cannot be done, one line."""

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fl.base.errors import FLError, Terminated
from surgery import SurgeryError
from surgery.errors import is_out_of_memory
from zoo import ZooError

_OTHERS: dict[str, str] = {}
"""Commands that stand in the place of one of ours, by its name."""


_running: list["Exit"] = []
"""The commands that run in this process, the innermost last: none in a program of the user's own."""


def in_command() -> bool:
    """Return whether a command runs, so that messages name flags, not arguments.

    >>> in_command()
    False
    """
    return bool(_running)


def program(name: str) -> str:
    """Say how a command is called, as this one was.

    That is `layer-surgery NAME`, or a module.
    """
    return _OTHERS.get(name) or as_called(f"python -m fl.{name}")


@contextmanager
def call_as(command: str, name: str = "run") -> Iterator[None]:
    """Within the block a command is called in another way, for another program's help.

    >>> with call_as("python -m train"):
    ...     program("run")
    'python -m train'
    """
    _OTHERS[name] = command
    try:
        yield
    finally:
        del _OTHERS[name]


def as_called(text: str) -> str:
    """Rewrite a text to call commands in the way in which the user called this one.

    >>> as_called("`python -m fl.run --help`")
    '`python -m fl.run --help`'
    """
    if Path(sys.argv[0]).stem != "layer-surgery":
        return text
    return re.sub(r"python -m (?:fl[. ]|(?=(?:surgery|zoo)\b))", "layer-surgery ", text)


def refuse_import(error: FLError) -> None:
    """End a command, as `guard` does, if its modules cannot be imported.

    Do nothing in any other program. The modules are imported before a command could guard itself: `python -m fl.NAME`
    imports the package first, while its own name is not known.
    """
    if Path(sys.argv[0]).stem in ("-m", "layer-surgery"):
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


@dataclass
class Exit:
    """The end of a command, with its exit code."""

    code: int = 0


@contextmanager
def guard(smaller: str = "--batch-size, --width or --max-parallel-clients") -> Iterator[Exit]:
    """End the block, a command, with one line for what cannot be done; give the exit code, which the block may set.

    It is 1 if training diverged, 2 for what cannot be run, 130 on Ctrl-C, 143 on SIGTERM.

    Args:
        smaller: the flags of this command that a smaller value of saves memory.

    >>> with guard() as ended:
    ...     ended.code = 3
    >>> ended.code
    3
    """
    ended, reason = Exit(), None
    _running.append(ended)
    try:
        yield ended
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        ended.code = exit_code(error)
    except BrokenPipeError:  # `| head` has read enough; discard what Python still flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        ended.code = 0
    except OSError as error:
        reason = str(error)
        try:
            if error.filename is None:  # whatever was being written to: is it the output?
                print(flush=True)
        except OSError:  # it is the output that cannot be written; discard what Python still flushes at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            reason = f"the output cannot be written ({error.strerror}): send it to a place with room"
        ended.code = 2
    except (FLError, SurgeryError, ZooError) as error:
        ended.code, reason = 1 if error.code == "diverged" else 2, str(error)
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        ended.code, reason = 2, f"out of memory: use a smaller {smaller}"
    finally:
        _running.pop()
    if reason is not None:
        print(as_called(f"error: {reason}"), file=sys.stderr)


def exit_code(error: KeyboardInterrupt) -> int:
    """Return the exit code of a stopped process: 128 and the number of the signal."""
    return 143 if isinstance(error, Terminated) else 130


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Within it these loggers say nothing below errors."""
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, before):
            logger.setLevel(level)
