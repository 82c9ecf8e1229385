"""Each client's step captured once as a CUDA graph and replayed; several clients on parallel streams.

Eager steps of small models wait for the launches of their many small kernels; a graph is one launch. Clients of
different architectures run side by side like those of one. Captures are kept for the next rounds.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from fl.engine.job import Group, Job, Results, Trained, longest_first
from fl.engine.replica import Replica
from fl.errors import FLError
from surgery.errors import first_line

_STREAMS = 8  # clients side by side
_WARM_UP = 3  # eager steps before a capture, in which libraries choose their kernels and make their workspaces


class Slot(Replica):
    """A replica whose step reads its inputs from fixed places, so that it can be replayed."""

    def __init__(self, group: Group, capture: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        super().__init__(group)
        self.read = self.job.data, self.job.beside  # the graph reads their memory
        self.mine = tree_map(lambda tensor: tensor[0].clone(), self.context)
        self.index, self.key = (t[0, 0].clone() for t in (self.job.batches.index, self.job.batches.keys))
        self.lr = torch.zeros((), device=self.job.device)
        self.attach(group)
        self.job = replace(self.job, optimizer=self.job.optimizer._replace(lr=self.lr))
        self.load(0)
        before = list(map(id, self._state().values()))
        self.replay = capture(lambda: self.step(self.index, self.key, self.mine))
        if before != list(map(id, self._state().values())):
            raise FLError(
                f"{type(self.model).__name__} puts new tensors in the place of its buffers, which a graph cannot: "
                "change them in place, or use --backend loop"
            )

    def attach(self, group: Group) -> None:
        """Take the clients of another round."""
        self.job, self.starts, self.context = group
        self.lr.fill_(self.job.optimizer.lr)

    def load(self, k: int) -> Any:
        """Put the k-th client's start and context in place."""
        tree_map(lambda place, value: place.copy_(value), self.mine, super().load(k))
        return self.mine

    def advance(self, k: int, s: int) -> None:
        """The s-th step of the k-th client."""
        self.index.copy_(self.job.batches.index[k, s])
        self.key.copy_(self.job.batches.keys[k, s])
        self.replay()


class Kept:
    """The slots of one architecture, one a stream, for as long as what was captured is what is wanted."""

    def __init__(self) -> None:
        self.program: tuple = ()
        self.slots: dict[int, Slot] = {}

    def slot(self, place: int, group: Group, capture: Callable) -> Slot:
        """The slot of a place, with the clients of this round."""
        if place in self.slots:
            self.slots[place].attach(group)
        else:
            self.slots[place] = Slot(group, capture)
        return self.slots[place]

    def renew(self, group: Group) -> None:
        """Drop all slots if they do something else than this group wants."""
        job, starts, context = group
        leaves, structure = tree_flatten(context)
        shapes = [(t.shape[1:], t.dtype) for t in (*starts.values(), *leaves)]
        settings = job.optimizer._replace(lr=0.0), job.augment, job.precision, job.batches.index.shape[-1]
        # Printed, a model shows its modules' settings (rates, momenta), which a capture has in it.
        what = str(job.model), job.trainable(), list(starts), structure, shapes
        program = (id(job.data), id(job.beside), ref(job.objective), job.ascent and ref(job.ascent), settings, *what)
        if program != self.program:
            self.program, self.slots = program, {}

    def release(self) -> None:
        """Forget the round, whose tensors may go."""
        for slot in self.slots.values():
            slot.job = slot.starts = slot.context = None


_DATA = 2  # sets of a model's clients: the honest ones' and those that an attack has spoilt take turns
_KEPT: WeakKeyDictionary[nn.Module, dict[int, Kept]] = WeakKeyDictionary()


def _kept(job: Job) -> Kept:
    """What is kept of a model with this data."""
    mine, key = _KEPT.setdefault(job.model, {}), id(job.data)
    if key not in mine and len(mine) == _DATA:
        del mine[next(iter(mine))]
    return mine.setdefault(key, Kept())


def train(groups: Sequence[Group]) -> list[Trained]:
    """Train the clients of all groups, as many at a time as there are streams. See `fl.engine.train`."""
    device = groups[0][0].device
    streams = _streams(device)
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream(device))
    try:
        return _side_by_side(groups, [torch.cuda.stream(stream) for stream in streams], _captured)
    finally:
        for stream in streams:
            stream.synchronize()  # what the round has allocated may go from here on


def _side_by_side(
    groups: Sequence[Group], places: Sequence[AbstractContextManager], capture: Callable
) -> list[Trained]:
    """Every place takes the next client when its last one is done; their steps take turns."""
    results = [Results(group) for group in groups]
    models = [job.model for job, _, _ in groups]
    kept = [_kept(job) if models.count(job.model) == 1 else Kept() for job, _, _ in groups]
    for mine, group in zip(kept, groups):
        mine.renew(group)
    queue = iter(longest_first(groups))

    def work(place: int):
        for g, k in queue:
            with places[place]:
                slot = kept[g].slot(place, groups[g], capture)
                slot.load(k)
            for s in range(slot.job.batches.steps[k]):
                with places[place]:
                    slot.advance(k, s)
                yield
            with places[place]:
                slot.save(k, results[g])

    running = [work(place) for place in range(len(places))]
    try:
        while running:
            running = [worker for worker in running if next(worker, worker) is not worker]
    finally:
        for mine in kept:
            mine.release()
    return [result.trained() for result in results]


@functools.lru_cache(maxsize=8)
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(_STREAMS)]


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """A function that replays the step, whose inputs and outputs stay where they are."""
    for _ in range(_WARM_UP):
        step()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            step()
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        raise FLError(
            f"a step cannot be captured as a graph: {first_line(error)}; use --backend loop or vmap"
        ) from error
    return graph.replay
