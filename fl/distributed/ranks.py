"""The processes of a simulation: how they meet, exchange tensors, and end.

They exchange by the process group of torch.distributed.
"""

import atexit
import io
import math
import os
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fl.base.console import exit_code
from fl.base.errors import Code, FLError, Terminated
from fl.base.torch_private import tree_flatten, tree_unflatten
from surgery.transfer import as_bytes

TIMEOUT = timedelta(hours=2)
"""How long a rank waits for the others, who may have more to train, before it counts them as lost."""

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_Entry = TypeVar("_Entry")


class Lost(FLError):
    """Another rank has ended, or does not answer."""

    def __init__(self, message: str, *, code: Code = "peers") -> None:
        super().__init__(message, code=code)


class Ranks:
    """The processes of a simulation, as one of them sees them.

    Attributes:
        rank: the number of this process, from 0.
        size: how many there are.
        local: the number of this process on its machine, from 0.
        device: where this rank trains, and where tensors are when they are sent.
        sharing: whether they are in the rounds of a run, where they share the work. In all else each is alone.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size
        self.local = int(os.environ.get("LOCAL_RANK", rank))
        self.device, self.sharing = torch.device("cpu"), False

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within it, the ranks share the work of each cohort."""
        self.sharing = self.size > 1
        try:
            yield
        finally:
            self.sharing = False

    def tell(self, word: Any) -> list[Any]:
        """Return every rank's word, a small object, in their order; waits for all of them.

        Raises:
            Lost: if that fails.

        >>> Ranks().tell("ready")
        ['ready']
        """
        words = [word] * self.size
        if self.size > 1:
            with _reaching():
                dist.all_gather_object(words, word)
        return words

    def gather(self, value: Any) -> list[Any]:
        """Return what each rank gives, in order: tensors in dicts, lists and tuples.

        What others give arrives on the device of this rank.

        Raises:
            Lost: if that fails.

        >>> Ranks().gather({"w": torch.ones(2)})
        [{'w': tensor([1., 1.])}]
        """
        if self.size == 1:
            return [value]
        tensors, own_form = tree_flatten(value)
        result = []
        # Shapes go first, between CPUs: who waits for a rank that still trains does so there, where a signal or the end
        # of that rank is noticed, and not in a kernel of a GPU.
        for rank, (form, kinds) in enumerate(self.tell((own_form, [(t.dtype, t.shape) for t in tensors]))):
            lengths = [dtype.itemsize * math.prod(shape) for dtype, shape in kinds]
            data = torch.empty(sum(lengths), dtype=torch.uint8, device=self.device)
            if rank == self.rank and tensors:
                torch.cat([as_bytes(t.to(self.device)) for t in tensors], out=data)
            if len(data):
                with _reaching():
                    dist.broadcast(data, rank)
            parts = zip(data.split(lengths), kinds)  # cloned, since they may begin where their dtype may not
            copies = [part.clone().view(dtype).view(shape) for part, (dtype, shape) in parts]
            result.append(value if rank == self.rank else tree_unflatten(copies, form))
        return result

    def share(self, work: Sequence[int], function: Callable[[Sequence[int]], Sequence[_Entry]]) -> list[_Entry]:
        """Return the entries of all rows on every rank.

        Each rank computes the entries of the rows that `deal` gives it.

        Args:
            work: of each row, in any unit.
            function: some rows -> an entry for each of them: tensors in dicts, lists and tuples.

        >>> Ranks().share([1, 1], lambda rows: [torch.tensor(row) for row in rows])
        [tensor(0), tensor(1)]
        """
        if not self.sharing:
            return list(function(range(len(work))))
        dealt = deal(work, self.size)
        own_rows = dealt[self.rank]
        every = self.gather(list(function(own_rows)) if own_rows else [])
        by_row = {row: entry for rows, entries in zip(dealt, every) for row, entry in zip(rows, entries)}
        return [by_row[row] for row in range(len(work))]


def deal(work: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal a cohort's rows to ranks: the largest first, to the least busy rank.

    The result is the same on all ranks. No rank has more than 4/3 of the work that the best way to deal would give it
    (Graham, "Bounds on multiprocessing timing anomalies", 1969). With fewer rows than ranks, some ranks have none.

    Args:
        work: of each row, in any unit; rows without work count as 1.

    >>> deal([3, 1, 1, 1], ranks=2)
    [[0], [1, 2, 3]]
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(range(len(work)), key=lambda row: (-work[row], row)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        dealt[rank].append(row)
        loads[rank] += max(work[row], 1)
    return [sorted(rows) for rows in dealt]


@contextmanager
def _reaching() -> Iterator[None]:
    """Within it, what the process group does not do is the fault of another rank."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0][:200]
        raise Lost(f"another rank has ended, or does not answer: {reason}") from error


_current = Ranks()
_inside = False  # of `join_ranks`
_store: Any = None


def current() -> Ranks:
    """Return the ranks of this process: one, or the several of its simulation."""
    return _current


def is_one_of_several(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether torchrun or a similar tool started this as one of several.

    >>> is_one_of_several({"WORLD_SIZE": "2"})
    False
    """
    return all(name in environment for name in _VARIABLES) and environment["WORLD_SIZE"] != "1"


def is_joined() -> bool:
    """Return whether this is within `join_ranks`, in one of several processes."""
    return _inside


@contextmanager
def join_ranks() -> Iterator[Ranks]:
    """Join the other processes in the block, if this was started as one of several.

    Only rank 0 prints and reports errors. The block may lie within another. All ranks end with the first that fails:
    rank 0 says which one that was, and why. One that dies without a word is in torchrun's report.

    Raises:
        FLError: on rank 0, for what went wrong on any of the ranks.
        SystemExit: on the others.
    """
    global _inside
    if _inside or not is_one_of_several():
        yield _current
        return
    ranks = _current if _current.size > 1 else _join()
    _inside = True
    try:
        if ranks.rank == 0:
            yield ranks
        else:
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                yield ranks
    except BaseException as error:
        if ranks.rank:
            raise SystemExit(_report_failure(ranks, error)) from None
        if isinstance(error, (Lost, Terminated)) and (reason := _reason(ranks)):
            raise FLError(reason, code="peers") from None
        raise
    finally:
        _inside = False


def _join() -> Ranks:
    global _current, _store
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    try:
        _store, *_ = next(dist.rendezvous("env://", rank, size, timeout=TIMEOUT))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        dist.init_process_group(backend, store=_store, rank=rank, world_size=size, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as error:
        where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        raise FLError(
            f"rank {rank} does not reach the other ranks at {where}: {str(error).splitlines()[0]}", code="peers"
        ) from error
    _current = Ranks(rank, size)
    atexit.register(dist.destroy_process_group)
    return _current


def _report_failure(ranks: Ranks, error: BaseException) -> int:
    """Leave an error's reason for rank 0, on another rank. Returns its exit code."""
    if isinstance(error, KeyboardInterrupt):
        return exit_code(error)
    if isinstance(error, SystemExit):  # of the command line, which rank 0 refuses as well
        return error.code if isinstance(error.code, int) else 2
    if isinstance(error, Lost):  # not the first to end
        return 2
    if isinstance(error, (FLError, OSError, MemoryError)):
        reason = " ".join(str(error).split())
    else:
        traceback.print_exception(error, file=sys.__stderr__)
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    with suppress(RuntimeError):
        _store.set(f"failed/{ranks.rank}", f"rank {ranks.rank} ({socket.gethostname()}): {reason}")
    return 2


def _reason(ranks: Ranks) -> str:
    """Return why another rank has failed, if it could say that."""
    with suppress(RuntimeError):
        for rank in range(1, ranks.size):
            if _store.check([key := f"failed/{rank}"]):
                return _store.get(key).decode()
    return ""
