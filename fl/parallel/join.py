"""A process becomes one of several, and leaves them with or without a fault."""

import atexit
import io
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from datetime import timedelta

from fl.base.console import stopped
from fl.base.errors import FLError
from fl.parallel.ranks import Ranks, Stopped, become, current
from fl.parallel.watch import SILENT, Lost

_SAID = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_one_of_several(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether torchrun (or something like it) has started this process as one of several.

    >>> is_one_of_several({"WORLD_SIZE": "2"})
    False
    """
    return all(name in environment for name in _SAID) and environment["WORLD_SIZE"] != "1"


@contextmanager
def joined() -> Iterator[Ranks]:
    """Within it, this process is one of several, if it was started as one. Only rank 0 prints and reports errors.

    It may lie within another. All ranks end with the first that fails: rank 0 says which one that was, and why. If rank
    0 itself is lost, another rank says that.

    Raises:
        FLError: on rank 0, for whatever went wrong on any of the ranks.
        SystemExit: on the others.
    """
    global _inside
    if _inside or not is_one_of_several():
        yield current()
        return
    ranks = current() if current().size > 1 else _join()
    quiet, _inside = io.StringIO(), True
    try:
        if ranks.rank == 0:
            yield ranks
        else:
            with redirect_stdout(quiet), redirect_stderr(quiet):
                yield ranks
    except BaseException as error:
        atexit.unregister(ranks.leave)
        if ranks.rank == 0:
            ranks.stop()
            ranks.watch.leave()
            raise
        raise SystemExit(_failed(ranks, error, quiet.getvalue())) from None
    finally:
        _inside = False


_inside = False


def _join() -> Ranks:
    from torch.distributed import rendezvous  # is slow to import, and few runs need it

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        store, *_ = next(rendezvous("env://", rank, size, timeout=timedelta(seconds=2 * SILENT)))
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise FLError(f"rank {rank} does not reach the other ranks at {where}: {str(error).splitlines()[0]}") from error
    ranks = Ranks(rank, size, store)
    become(ranks)
    atexit.register(ranks.leave)
    return ranks


def _failed(ranks: Ranks, error: BaseException, said: str) -> int:
    """What another rank than 0 does about an error; returns its exit code."""
    if isinstance(error, Stopped) or (isinstance(error, SystemExit) and not error.code):
        ranks.watch.leave()
        return 0
    if isinstance(error, KeyboardInterrupt):
        reason = "it was interrupted"
    elif isinstance(error, SystemExit):
        reason = ([line.strip(" │") for line in said.splitlines() if line.strip(" │╭╰─╮╯")] or ["it refused to start"])[
            -1
        ]
    else:
        known = isinstance(error, (FLError, OSError, MemoryError))
        reason = " ".join(str(error).split()) if known else f"{type(error).__name__}: {error}".splitlines()[0]
        if not known:
            traceback.print_exception(error, file=sys.__stderr__)
    if isinstance(error, Lost):
        if ranks.watch.speaks():
            print(f"\nerror: {reason}", file=sys.__stderr__, flush=True)  # rank 0 may have left a bar
        ranks.watch.leave()
    else:
        ranks.watch.fail(reason)
    return stopped(error) if isinstance(error, KeyboardInterrupt) else 2
