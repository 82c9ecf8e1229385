"""How the command lines end: an exit code, and one line for what cannot be done."""

import sys
from collections.abc import Callable

import torch

from fl.base.errors import Diverged, FLError
from surgery import SurgeryError
from zoo import ZooError


def guarded(command: Callable[[], int], smaller: str = "--batch-size, --width or --chunk (clients at a time)") -> int:
    """The exit code of a command: its own, 1 if training diverged, 2 for what cannot be run, 130 on Ctrl-C.

    Args:
        smaller: the flags of this command that a smaller value of saves memory.

    >>> guarded(lambda: 0)
    0
    """
    try:
        return command()
    except KeyboardInterrupt:
        return 130
    except Diverged as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except (FLError, SurgeryError, ZooError, OSError) as error:
        reason = str(error)
    except (MemoryError, torch.OutOfMemoryError):
        reason = f"out of memory: use a smaller {smaller}"
    except RuntimeError as error:
        if "can't allocate memory" not in str(error) and "not enough memory" not in str(error):
            raise
        reason = f"out of memory: use a smaller {smaller}"
    print(f"error: {reason}", file=sys.stderr)
    return 2
