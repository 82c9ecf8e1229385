"""How the command lines end: an exit code, and one line for what cannot be done."""

import os
import sys
from collections.abc import Callable

from fl.base.errors import Diverged, FLError

_ELSEWHERE = {"surgery.errors": "SurgeryError", "zoo.errors": "ZooError", "torch": "OutOfMemoryError"}
"""Errors of packages that are slow to import: what was not imported was not raised."""


def guarded(command: Callable[[], int], smaller: str = "--batch-size, --width or --chunk (clients at a time)") -> int:
    """The exit code of a command: its own, 1 if training diverged, 2 for what cannot be run, 130 on Ctrl-C.

    Args:
        smaller: the flags of this command that a smaller value of saves memory.

    >>> guarded(lambda: 0)
    0
    """
    try:
        code = command()
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has read enough; discard what Python still flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Diverged as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (FLError, OSError, *_loaded("SurgeryError", "ZooError")) as error:
        reason = str(error)
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, (MemoryError, *_loaded("OutOfMemoryError"))) and not any(
            words in str(error) for words in ("can't allocate memory", "not enough memory")
        ):
            raise
        reason = f"out of memory: use a smaller {smaller}"
    print(f"error: {reason}", file=sys.stderr)
    return 2


def _loaded(*names: str) -> list[type[BaseException]]:
    """The errors of these names, of the packages that were imported."""
    there = [(sys.modules[module], name) for module, name in _ELSEWHERE.items() if module in sys.modules]
    return [getattr(module, name) for module, name in there if name in names]
