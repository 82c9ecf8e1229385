"""Clients that train all the time, in simulated time: who finishes when, and who begins in their places."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl.base.rng import Rng

Flight = dict[str, Tensor]
"""Who trains: clients, the versions of the model that they began from, and when they finish, [concurrency] each."""


class Events(NamedTuple):
    """What happens until the buffer is full: clients finish, and others begin in their places.

    Attributes:
        clients: who finishes, in this order.
        slots: the place of each among those that trained before; -1 for who has begun since the buffer was last full,
            and so from the global model as it is.
        time: when the last one finishes.
        flight: who trains afterwards.
        replaced: the places in which others have begun, from the model as it was while the buffer filled.
        fresh: the places of those who begin after the buffer is full, from the new model.
    """

    clients: list[int]
    slots: list[int]
    time: float
    flight: Flight
    replaced: list[int]
    fresh: list[int]


@dataclass(frozen=True)
class Clock:
    """The simulation. Whoever finishes is replaced by a client that neither trains nor is in the buffer.

    Those who finish at the moment when the buffer is full, or find no other client, are replaced after the server's
    step. Who begins first is the same in every run.

    Args:
        durations: seconds that each client takes.
        concurrency: clients that train at any time.
        buffer: updates after which the server moves.
    """

    durations: Sequence[float]
    concurrency: int
    buffer: int

    def begin(self) -> Flight:
        """The first clients, who begin at time 0 from version 0."""
        first = Rng(0, 0).numpy("fedbuff").permutation(len(self.durations))[: self.concurrency].tolist()
        ends = torch.tensor([self.durations[client] for client in first], dtype=torch.float64)
        versions = torch.zeros(self.concurrency, dtype=torch.int64)
        return {"clients": torch.tensor(first), "versions": versions, "ends": ends}

    def events(
        self, before: Flight, version: int, now: float, rng: Rng, clients: Sequence[int] | None = None
    ) -> Events:
        """The events of a round; those of other clients than would finish, if the round is of others.

        Args:
            before: who trains when the round begins.
            version: of the global model.
            now: when the buffer was last full.
        """
        flight, generator = {name: tensor.clone() for name, tensor in before.items()}, rng.numpy("fedbuff")
        finished: list[int] = []
        slots: list[int] = []
        waiting: list[int] = []
        time, since = 0.0, set[int]()
        while len(finished) < self.buffer:
            slot = int(flight["ends"].argmin())
            if float(flight["ends"][slot]) > time:  # those who finish at one time are replaced together
                begun = self._replace(flight, waiting, time, version, finished, generator)
                since, waiting = since.union(begun), [one for one in waiting if one not in begun]
                slot = int(flight["ends"].argmin())
                time = float(flight["ends"][slot])
            finished.append(int(flight["clients"][slot]))
            slots.append(-1 if slot in since else slot)
            flight["ends"][slot] = torch.inf
            waiting.append(slot)
        if clients is not None and list(clients) != finished:
            flight, there = {name: tensor.clone() for name, tensor in before.items()}, before["clients"].tolist()
            finished, slots = list(clients), [there.index(one) if one in there else -1 for one in clients]
            since, waiting = set(), sorted(set(slots) - {-1})
            time = max([now, *flight["ends"][waiting].tolist()])
        self._replace(flight, waiting, time, version + 1, finished, generator, again=True)
        return Events(finished, slots, time, flight, sorted(since), waiting)

    def _replace(
        self,
        flight: Flight,
        places: Sequence[int],
        time: float,
        version: int,
        busy: Collection[int],
        generator: np.random.Generator,
        again: bool = False,
    ) -> list[int]:
        """Begin with other clients in these places; returns those for which there are some."""
        if not places:
            return []
        flying = {client for slot, client in enumerate(flight["clients"].tolist()) if slot not in places}
        there = np.ones(len(self.durations), dtype=bool)
        there[[*flying, *busy]] = False
        free = np.flatnonzero(there)
        order = free[generator.permutation(len(free))[: len(places)]].tolist()
        if again and len(order) < len(places):
            same = [client for client in sorted(set(busy)) if client not in flying]
            order += [same[at] for at in generator.permutation(len(same))]
        for place, chosen in zip(places, order):
            flight["clients"][place], flight["versions"][place] = chosen, version
            flight["ends"][place] = time + self.durations[chosen]
        return list(places[: len(order)])
