"""FedBuff: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (AISTATS 2022), algorithm 1."""

from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import numpy as np
import torch

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.progress import of_shape
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.settings import AtLeast0, Natural, number
from fl.federation import Federation
from surgery import broadcast
from surgery.transfer import upload


@dataclass(frozen=True)
class FedBuffOptions:
    """FedBuff."""

    concurrency: Natural = 0
    """clients that train at any time; 0 is twice --participants, which is the size of the buffer (the paper: 10)"""
    lr: Annotated[float, number(float, above=0)] = 1.0
    """learning rate of the server"""
    staleness: AtLeast0 = 0.5
    """exponent by which an update from an old model counts less: (1 + steps of the server since)^-staleness; 0: all
    count alike"""


class Events(NamedTuple):
    """What happens until the buffer is full, in simulated time: K clients finish, and others begin in their places.

    Attributes:
        clients: who finishes, in this order.
        slots: the place of each among those that trained before; -1 for who has begun since the buffer was last full,
            and so from the global model as it is.
        time: when the last one finishes.
        flight: who trains afterwards: clients, the versions that they began from, and when they finish.
        fresh: the places of those who begin after the buffer is full, from the new model.
    """

    clients: list[int]
    slots: list[int]
    time: float
    flight: dict[str, torch.Tensor]
    fresh: list[int]


def fedbuff(fed: Federation, options: FedBuffOptions = FedBuffOptions()) -> Algorithm:
    """Clients train all the time, each from the model as it was when it began; the server moves after every K updates.

    A round is a full buffer. Whoever finishes makes place for another client, drawn uniformly among those that neither
    train nor are in the buffer, who begins at once from the global model; those who finish at the moment when it is
    full, or find no other client, are replaced after the server's step

        w <- w + lr mean of (1 + tau)^-staleness (w_i - the model that i began from)

    with tau the number of steps of the server since then. Clients count alike, as in the paper. How long each takes
    comes from --pace; without it all are equally fast, and those with more samples take longer. A round reports the
    mean `staleness` tau of its updates and its `simulated_seconds`. Buffers of the model (batch-norm statistics) are
    averaged. The server stores a model for each client that trains. Who begins is the same in every run.

    With as many clients training as the buffer holds, all of which take equally long, this is FedAvg with equal
    weights.

    Raises:
        FLError: for fewer clients than the buffer holds, more than there are, and clients on other machines.
    """
    k, everybody = fed.participants, len(fed.clients)
    m = options.concurrency or min(2 * k, everybody)
    if fed.remote:
        raise FLError("fedbuff simulates who finishes when, and clients on other machines are real: take fedavg")
    if fed.pace and fed.pace.deadline:
        raise FLError("--pace.deadline ends rounds, and fedbuff waits for nobody: leave it out")
    if not k <= m <= everybody:
        raise FLError(f"--fedbuff.concurrency {m}: give --participants {k}, the size of the buffer, to all {everybody}")
    durations = fed.seconds(range(everybody))

    def init():
        generator = Rng(0, 0).numpy("fedbuff")
        first = generator.permutation(everybody)[:m].tolist()
        flight = {
            "clients": torch.tensor(first),
            "versions": torch.zeros(m, dtype=torch.int64),
            "ends": torch.tensor([durations[client] for client in first], dtype=torch.float64),
        }
        start = fed.initial()
        clock = {"version": torch.tensor(0), "time": torch.tensor(0.0, dtype=torch.float64)}
        return {"global": start, "begun": broadcast(start, m), "flight": flight, "clock": clock}

    def events(state, rng, clients=None):
        """The events of a round; those of other clients than would finish, if the round is of others."""
        flight = {name: tensor.clone() for name, tensor in state["flight"].items()}
        version, generator = int(state["clock"]["version"]), rng.numpy("fedbuff")
        finished, slots, time, waiting, since = [], [], 0.0, [], set()
        while len(finished) < k:
            slot = int(flight["ends"].argmin())
            if float(flight["ends"][slot]) > time:  # those who finish at one time are replaced together
                begun = replace_some(flight, waiting, time, version, finished, generator)
                since, waiting = since.union(begun), [one for one in waiting if one not in begun]
                slot = int(flight["ends"].argmin())
                time = float(flight["ends"][slot])
            finished.append(int(flight["clients"][slot]))
            slots.append(-1 if slot in since else slot)
            flight["ends"][slot] = torch.inf
            waiting.append(slot)
        if clients is not None and list(clients) != finished:
            flight, there = {n: t.clone() for n, t in state["flight"].items()}, state["flight"]["clients"].tolist()
            finished, slots = list(clients), [there.index(one) if one in there else -1 for one in clients]
            waiting = sorted(set(slots) - {-1})
            time = max([float(state["clock"]["time"]), *flight["ends"][waiting].tolist()])
        replace_some(flight, waiting, time, version + 1, finished, generator, again=True)
        return Events(finished, slots, time, flight, waiting)

    def replace_some(flight, places, time, version, busy, generator, again=False):
        """Begin with other clients in these places; returns those for which there are some."""
        if not places:
            return []
        flying = {client for slot, client in enumerate(flight["clients"].tolist()) if slot not in places}
        there = np.ones(everybody, dtype=bool)
        there[[*flying, *busy]] = False
        free = np.flatnonzero(there)
        order = free[generator.permutation(len(free))[: len(places)]].tolist()
        if again and len(order) < len(places):
            same = [client for client in sorted(set(busy)) if client not in flying]
            order += [same[at] for at in generator.permutation(len(same))]
        for place, chosen in zip(places, order):
            flight["clients"][place], flight["versions"][place] = chosen, version
            flight["ends"][place] = time + durations[chosen]
        return places[: len(order)]

    def starts(state, found):
        rows = upload(torch.tensor([slot if slot >= 0 else m for slot in found.slots]), fed.data.device)
        return {n: torch.cat([t, state["global"][n][None]]).index_select(0, rows) for n, t in state["begun"].items()}

    def sample(state, rng):
        return events(state, rng).clients

    def send(state, clients, rng):
        return {"model": starts(state, events(state, rng, clients))}

    def server(state, clients, update, rng):
        found, old = events(state, rng, clients), state["global"]
        version, before = int(state["clock"]["version"]), state["flight"]["versions"].tolist()
        stale = torch.tensor([version - before[slot] if slot >= 0 else 0 for slot in found.slots], dtype=torch.float64)
        weights = upload((1 + stale) ** -options.staleness, fed.data.device)
        start, arrived = starts(state, found), [float(size > 0) for size in update.sizes]
        rates = {n: of_shape(options.lr * weights, start[n]) for n in fed.trainable}
        moved = {n: old[n] + rate * (update.received[n] - start[n]) for n, rate in rates.items()}
        new = fed.average({**update.received, **moved}, arrived)
        left = (found.flight["clients"] != state["flight"]["clients"]) | (
            found.flight["ends"] != state["flight"]["ends"]
        )
        places = left.nonzero().flatten().tolist()
        models = {name: tensor.clone() for name, tensor in state["begun"].items()}
        for name, tensor in models.items():
            for slot in places:
                tensor[slot] = new[name] if slot in found.fresh else old[name]
        clock = {"version": torch.tensor(version + 1), "time": torch.tensor(found.time, dtype=torch.float64)}
        metrics = {"staleness": stale.mean().item(), "simulated_seconds": found.time - float(state["clock"]["time"])}
        return {"global": new, "begun": models, "flight": found.flight, "clock": clock}, metrics

    return replace(fedavg(fed), init=init, sample=sample, send=send, server=server)


METHOD = Method(
    fedbuff,
    FedBuffOptions(),
    columns={"staleness": float},
    refuses={
        "presence": "draws its clients itself, from all of them",
        "privacy": "weighs updates by how late they are",
    },
)
