"""What the processes of a simulation tell each other: short words through a store, and tensors through a backend."""

import json
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.parallel.packing import ALIGNED, Kind, heard, packed, places, said, unpacked
from fl.parallel.watch import SILENT, Lost, Watch

_LONGEST = 0.02  # seconds between two looks at what the others have said
_AT_ONCE = 2**25  # bytes of each rank in one transfer, so that a slow network does not look like a hanging rank


class Stopped(FLError):
    """Rank 0 goes no further.

    Attributes:
        result: what it leaves: the summary of its run, or why training diverged; None if it was interrupted or failed.
    """

    def __init__(self, result: dict[str, Any] | None) -> None:
        super().__init__("rank 0 has ended the run")
        self.result = result


class Ranks:
    """The processes of a simulation, as one of them sees them.

    Attributes:
        rank: the number of this process, from 0.
        size: how many there are.
        sharing: whether they are in the rounds of a run, where they share the work. In all else each is alone.
        local: the number of this process on its machine, from 0.
        device: where this rank trains, and where tensors are when they are sent.
        moved: bytes that were sent between ranks, by all of them together, since `read_moved`.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        self.rank, self.size, self.store = rank, size, store
        self.local = int(os.environ.get("LOCAL_RANK", rank))
        self.device = torch.device("cpu")
        self.sharing, self.moved = False, 0
        self._said = 0  # words so far; all ranks count alike
        self._grouped = False
        self.watch: Watch | None = None
        if store is not None:
            self._say({"host": socket.gethostname()})
            hosts = [word["host"] for word in self._heard(start=True)]
            self.watch = Watch(rank, hosts, store)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Within it, the ranks share the work of each cohort. After it they may save what they have, undisturbed."""
        self.sharing = self.size > 1
        try:
            yield
        finally:
            self.sharing = False
            if self.watch is not None:
                self.watch.saving = True

    def exchange(self, word: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's word, in their order; waits for all of them. Words are what JSON can say.

        Raises:
            Stopped: if rank 0 has stopped instead.
            Lost: if a rank has failed, died or hangs.
        """
        if self.size == 1:
            return [word]
        self.watch.saving = False
        self._say(word)
        with self.watch.waiting():
            words = self._heard()
        if "stop" in words[0]:
            raise Stopped(words[0]["stop"])
        return words

    def stop(self, result: dict[str, Any] | None = None) -> None:
        """Rank 0: let the others know that it goes no further, wherever they are. It waits for nobody.

        Args:
            result: see `Stopped`.
        """
        if self.size == 1 or self.watch.cut:
            return
        with suppress(FLError):  # where nobody hears it any more
            self._say({"stop": result})
            self._said += 1
            if result is None:  # rank 0 may have been interrupted after it had said its last word
                self._say({"stop": result})

    def gather(self, mine: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """The tensors of every rank by name, in the order of the ranks, on the device of this one. Each rank may give
        others, or none.

        >>> Ranks().gather({"w": torch.ones(2)})
        [{'w': tensor([1., 1.])}]
        """
        if self.size == 1:
            return [dict(mine)]
        words = self.exchange({"tensors": {name: said(tensor) for name, tensor in mine.items()}})
        kinds = [{name: heard(*kind) for name, kind in word["tensors"].items()} for word in words]
        lengths = [places(each.values())[1] for each in kinds]
        own = packed(mine.values(), self.device)
        found = self._move([own] * self.size, [[length] * self.size for length in lengths])
        found[self.rank] = own
        return [dict(zip(each, unpacked(buffer, each.values()))) for each, buffer in zip(kinds, found)]

    def swap(self, given: Sequence[Sequence[Tensor]], kinds: Sequence[Sequence[Kind]]) -> list[list[Tensor]]:
        """What each rank sends to this one, in the order of the ranks: every rank sends something else to every other.

        Args:
            given: what this rank sends to each; what it sends to itself is returned as it is.
            kinds: dtype and shape of what each rank sends to this one, which it knows beforehand.

        >>> Ranks().swap([[torch.ones(2)]], [[(torch.float32, [2])]])
        [[tensor([1., 1.])]]
        """
        if self.size == 1:
            return [list(given[0])]
        buffers = [packed([] if rank == self.rank else each, self.device) for rank, each in enumerate(given)]
        words = self.exchange({"bytes": [len(buffer) for buffer in buffers]})
        found = self._move(buffers, [word["bytes"] for word in words])
        return [
            list(given[rank]) if rank == self.rank else unpacked(buffer, each)
            for rank, (buffer, each) in enumerate(zip(found, kinds))
        ]

    def _move(self, buffers: Sequence[Tensor], lengths: Sequence[Sequence[int]]) -> list[Tensor]:
        """The bytes that each rank sends to this one; none from itself.

        Args:
            buffers: the bytes for each rank.
            lengths: how many bytes each rank sends to each: [sender][receiver].
        """
        lengths = [[0 if a == b else n for b, n in enumerate(row)] for a, row in enumerate(lengths)]
        most, here = max(map(max, lengths)), self.rank
        found = [torch.empty(row[here], dtype=torch.uint8, device=self.device) for row in lengths]
        step = _AT_ONCE // self.size // ALIGNED * ALIGNED
        self._connect()
        with self.watch.waiting(), self._named():
            for first in range(0, most, step):
                out = [buffer[first : min(first + step, n)] for buffer, n in zip(buffers, lengths[here])]
                into = [buffer[first : first + step] for buffer in found]
                arrived = torch.empty(sum(map(len, into)), dtype=torch.uint8, device=self.device)
                sizes = [len(piece) for piece in into], [len(piece) for piece in out]
                torch.distributed.all_to_all_single(arrived, torch.cat(out), *sizes)
                for piece, part in zip(into, arrived.split(sizes[0])):
                    piece.copy_(part)
        self.moved += sum(map(sum, lengths))
        return found

    def read_moved(self) -> int:
        """The bytes that were moved since the last reading."""
        moved, self.moved = self.moved, 0
        return moved

    def leave(self) -> None:
        """The end of this process's part, without a fault."""
        if self.watch is not None:
            self.watch.leave()
        if self._grouped:
            torch.distributed.destroy_process_group()
            self._grouped = False

    def _connect(self) -> None:
        """Make the group through which tensors move, if there is none yet."""
        if self._grouped:
            return
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        group = torch.distributed.PrefixStore("group", self.store)
        with self.watch.waiting(), self._named():
            torch.distributed.init_process_group(
                backend, store=group, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=2 * SILENT)
            )
        self._grouped = True

    def _say(self, word: dict[str, Any]) -> None:
        with self._named():
            self.store.set(f"word/{self._said}/{self.rank}", json.dumps(word))
            if self._said >= 2:  # whoever has said the last word has read the one before it
                self.store.delete_key(f"word/{self._said - 2}/{self.rank}")

    def _heard(self, start: bool = False) -> list[dict[str, Any]]:
        """The words of all ranks."""
        keys = [f"word/{self._said}/{rank}" for rank in range(self.size)]
        began = time.monotonic()
        with self._named():
            while not self.store.check(keys):  # and not `wait`, which signals do not interrupt
                if self.watch is not None:
                    self.watch.check()
                waited = time.monotonic() - began
                if start and waited > 2 * SILENT:
                    late = ", ".join(str(rank) for rank, key in enumerate(keys) if not self.store.check([key]))
                    raise Lost(f"rank {late} did not start within {2 * SILENT} seconds")
                time.sleep(min(waited / 50, _LONGEST))
        with self._named():
            words = [json.loads(text) for text in self.store.multi_get(keys)]
        self._said += 1
        return words

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Within it, what the network does not do is the fault of a rank."""
        try:
            yield
        except FLError:
            raise
        except RuntimeError as error:
            raise self._unreachable(error) from error

    def _unreachable(self, error: Exception) -> Lost:
        return (self.watch and self.watch.blamed()) or Lost(f"the ranks do not reach each other: {_first(error)}")


def _first(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]


_ALONE = Ranks()
_current = _ALONE


def current() -> Ranks:
    """The ranks of this process; a single one if it was not started as one of several."""
    return _current


def become(ranks: Ranks) -> None:
    """From now on `current` returns these."""
    global _current
    _current = ranks
