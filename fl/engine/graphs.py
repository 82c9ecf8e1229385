"""Each client's step captured once as a CUDA graph and replayed; several clients on parallel streams.

Eager steps of small models wait for the launches of their many small kernels; a graph is one launch. Clients of
different architectures run side by side like those of one.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map

from fl.engine.job import Group, Results, Trained, longest_first
from fl.engine.replica import Replica
from fl.errors import FLError

_STREAMS = 8  # clients side by side
_WARM_UP = 3  # eager steps before a capture, in which libraries choose their kernels and make their workspaces


class Slot(Replica):
    """A replica whose step reads its inputs from fixed places, so that it can be replayed."""

    def __init__(self, group: Group, capture: Callable[[Callable[[], None]], Callable[[], None]]) -> None:
        super().__init__(group)
        self.job.model.train()
        self.mine = tree_map(lambda tensor: tensor[0].clone(), self.context)
        self.index, self.key = (t[0, 0].clone() for t in (self.job.batches.index, self.job.batches.keys))
        super().load(0)
        self.replay = capture(lambda: self.step(self.index, self.key, self.mine))

    def load(self, k: int) -> Any:
        """Put the k-th client's start and context in place."""
        tree_map(lambda place, value: place.copy_(value), self.mine, super().load(k))
        return self.mine

    def advance(self, k: int, s: int) -> None:
        """The s-th step of the k-th client."""
        self.index.copy_(self.job.batches.index[k, s])
        self.key.copy_(self.job.batches.keys[k, s])
        self.replay()


def train(groups: Sequence[Group]) -> list[Trained]:
    """Train the clients of all groups, as many at a time as there are streams. See `fl.engine.train`."""
    if (device := groups[0][0].device).type != "cuda":
        raise FLError(f"--backend graphs needs a CUDA device, and the data are on {device}: use workers or vmap")
    streams = [torch.cuda.Stream(device) for _ in range(_STREAMS)]
    ready = torch.cuda.current_stream(device)
    for stream in streams:
        stream.wait_stream(ready)
    results = _side_by_side(groups, [torch.cuda.stream(stream) for stream in streams], _captured)
    for stream in streams:
        stream.synchronize()  # the round is over; graphs and their memory can go
    return results


def _side_by_side(groups: Sequence[Group], places: Sequence[Any], capture: Callable) -> list[Trained]:
    """Every place (a context manager) takes the next client when its last one is done; their steps take turns."""
    results = [Results(group) for group in groups]
    queue = iter(longest_first(groups))
    slots: dict[tuple[int, int], Slot] = {}

    def work(place: int):
        for g, k in queue:
            with places[place]:
                slot = slots.get((place, g)) or slots.setdefault((place, g), Slot(groups[g], capture))
                slot.load(k)
            for s in range(slot.job.batches.steps[k]):
                with places[place]:
                    slot.advance(k, s)
                yield
            with places[place]:
                slot.save(k, results[g])

    running = [work(place) for place in range(len(places))]
    while running:
        running = [worker for worker in running if next(worker, worker) is not worker]
    return [result.trained() for result in results]


def _captured(step: Callable[[], None]) -> Callable[[], None]:
    """A function that replays the step, whose inputs and outputs stay where they are."""
    for _ in range(_WARM_UP):
        step()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        step()
    return graph.replay
