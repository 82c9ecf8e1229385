"""The device's memory: which storages lie in it, who used them last, and whether that was in order."""

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage

from pretend_gpu.rules import Forbidden

Span = tuple[int, int]  # bytes of a storage


def storage_of(tensor: Tensor) -> UntypedStorage:
    """The memory of a tensor, also of one that vmap has wrapped."""
    with torch._C.DisableTorchFunction():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return tensor.untyped_storage()


@dataclass
class Use:
    """The last write of some bytes, and the reads since, as (stream, number of its operation)."""

    write: tuple[int, int] | None = None
    reads: dict[int, int] = field(default_factory=dict)


@dataclass
class Block:
    """A piece of device memory."""

    storage: weakref.ref
    stream: int  # that it was allocated on
    pooled: bool  # whether it belongs to a graph
    uses: dict[Span, Use] = field(default_factory=dict)


class Memory:
    """All blocks, by the address of their storage's record."""

    def __init__(self, freed: Callable[[Block], None]) -> None:
        self._blocks: dict[int, Block] = {}
        self._freed = freed

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_of(tensor)._cdata in self._blocks

    def block(self, tensor: Tensor) -> Block | None:
        return self._blocks.get(storage_of(tensor)._cdata)

    def add(self, storage: UntypedStorage, stream: int, pooled: bool) -> None:
        """Count a storage as the device's from now on."""
        key = storage._cdata
        if key not in self._blocks:
            self._blocks[key] = Block(weakref.ref(storage, lambda _: self._gone(key)), stream, pooled)

    def drop(self, storage: UntypedStorage) -> None:
        self._blocks.pop(storage._cdata, None)

    def _gone(self, key: int) -> None:
        if block := self._blocks.pop(key, None):
            self._freed(block)


class Streams:
    """Which operations of which stream are known to be done, to each other stream and to the host."""

    def __init__(self) -> None:
        self.current, self.made = 0, [0]  # the default stream, and how many operations each was given
        self.known: list[dict[int, int]] = [{}]  # of each stream: up to which operation of others it has waited
        self.host: dict[int, int] = {}

    def new(self) -> int:
        self.made.append(0)
        self.known.append(dict(self.host))
        return len(self.made) - 1

    def wait(self, stream: int, other: int) -> None:
        """What the stream does from here on comes after all that the other was given."""
        for s, n in (*self.known[other].items(), (other, self.made[other])):
            self.known[stream][s] = max(n, self.known[stream].get(s, 0))

    def finish(self, stream: int) -> None:
        """The host waits for a stream."""
        for s, n in (*self.known[stream].items(), (stream, self.made[stream])):
            self.host[s] = max(n, self.host.get(s, 0))

    def finish_all(self) -> None:
        for stream in range(len(self.made)):
            self.finish(stream)

    def done(self, stream: int, number: int, by: int) -> bool:
        """Whether an operation of a stream is over before what another one is given next."""
        return stream == by or max(self.host.get(stream, 0), self.known[by].get(stream, 0)) >= number

    def use(self, blocks: Iterator[tuple[Block, Span, bool]], what: str) -> None:
        """The current stream does something with these bytes (and writes those marked so).

        Raises Forbidden for what another stream might still write, or still read where this one writes.
        """
        stream = self.current
        self.made[stream] += 1
        for block, span, writes in blocks:
            for (start, stop), use in block.uses.items():
                if start < span[1] and span[0] < stop:
                    before = [use.write] if use.write else []
                    before += use.reads.items() if writes else []
                    if late := [s for s, n in before if not self.done(s, n, stream)]:
                        verb = "writes" if writes else "reads"
                        raise Forbidden(f"{what}: stream {stream} {verb} what stream {late[0]} may not be done with")
            if writes:
                inner = [s for s in block.uses if span[0] <= s[0] and s[1] <= span[1]]
                for key in inner:
                    del block.uses[key]
                block.uses[span] = Use((stream, self.made[stream]))
            else:
                block.uses.setdefault(span, Use()).reads[stream] = self.made[stream]

    def check_free(self, block: Block) -> str:
        """What is wrong with giving a block back now: its stream could reuse the memory at once."""
        if block.pooled:
            return ""
        for use in block.uses.values():
            for s, n in ([use.write] if use.write else []) + list(use.reads.items()):
                if not self.done(s, n, block.stream):
                    return f"memory of stream {block.stream} is freed while stream {s} may still use it"
        return ""


def span(tensor: Tensor) -> Span:
    """From the first to the last byte."""
    start = tensor.storage_offset() * tensor.itemsize
    if not tensor.numel():
        return start, start
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (reach + 1) * tensor.itemsize
