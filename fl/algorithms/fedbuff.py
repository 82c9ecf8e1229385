"""FedBuff: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (AISTATS 2022), algorithm 1."""

from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import torch

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.progress import of_shape
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.settings import AtLeast0, AtLeast1, number
from fl.federation import Federation
from surgery import broadcast
from surgery.transfer import upload


@dataclass(frozen=True)
class FedBuffOptions:
    """FedBuff."""

    concurrency: AtLeast1 = 10
    """clients that train at any time; --participants is the size of the buffer (the paper: 10)"""
    lr: Annotated[float, number(float, above=0)] = 1.0
    """learning rate of the server"""
    staleness: AtLeast0 = 0.5
    """exponent by which an update from an old model counts less: (1 + steps of the server since)^-staleness; 0: all
    count alike"""


class Events(NamedTuple):
    """What happens until the buffer is full, in simulated time: K clients finish, and others begin in their places.

    Attributes:
        clients: who finishes, in this order.
        slots: the place of each among those that train.
        began: whether it has begun since the buffer was last full, and so from the global model as it is.
        time: when the last one finishes.
        flight: who trains afterwards: clients, the versions that they began from, and when they finish.
        fresh: the places of those who begin after the buffer is full, from the new model.
    """

    clients: list[int]
    slots: list[int]
    began: list[bool]
    time: float
    flight: dict[str, torch.Tensor]
    fresh: list[int]


def fedbuff(fed: Federation, options: FedBuffOptions = FedBuffOptions()) -> Algorithm:
    """Clients train all the time, each from the model as it was when it began; the server moves after every K updates.

    A round is a full buffer. Whoever finishes makes place for another client, drawn uniformly among those that neither
    train nor are in the buffer, who begins at once from the global model; those who finish at the moment when it is
    full are replaced after the server's step

        w <- w + lr mean of (1 + tau)^-staleness (w_i - the model that i began from)

    with tau the number of steps of the server since then. Clients count alike, as in the paper. How long each takes
    comes from --pace; without it all are equally fast, and those with more samples take longer. A round reports the
    mean `staleness` tau of its updates and its `simulated_seconds`. Buffers of the model (batch-norm statistics) are
    averaged. The server stores a model for each client that trains. Who begins is the same in every run.

    With as many clients training as the buffer holds, all of which take equally long, this is FedAvg with equal
    weights.

    Raises:
        FLError: unless there are more clients than train at a time, and for clients on other machines.
    """
    m, k, everybody = options.concurrency, fed.participants, len(fed.clients)
    if fed.remote:
        raise FLError("fedbuff simulates who finishes when, and clients on other machines are real: take fedavg")
    if fed.pace and fed.pace.deadline:
        raise FLError("--pace.deadline ends rounds, and fedbuff waits for nobody: leave it out")
    if not k <= m or everybody < m + k:
        raise FLError(
            f"--fedbuff.concurrency {m} with --participants {k} of --clients {everybody}: give at least as many as the "
            "buffer holds, and so many clients that others can take their places"
        )
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

    def events(state, rng):
        flight = {name: tensor.clone() for name, tensor in state["flight"].items()}
        version, generator = int(state["clock"]["version"]), rng.numpy("fedbuff")
        clients, slots, began, time = [], [], [], 0.0
        since, waiting = [False] * m, []
        while len(clients) < k:
            slot = int(flight["ends"].argmin())
            if float(flight["ends"][slot]) > time:  # those who finish at one time are replaced together
                replace_all(flight, waiting, time, version, clients, generator)
                for place in waiting:
                    since[place] = True
                waiting = []
                slot = int(flight["ends"].argmin())
                time = float(flight["ends"][slot])
            clients.append(int(flight["clients"][slot]))
            slots.append(slot)
            began.append(since[slot])
            flight["ends"][slot] = torch.inf
            waiting.append(slot)
        replace_all(flight, waiting, time, version + 1, clients, generator)
        return Events(clients, slots, began, time, flight, waiting)

    def replace_all(flight, places, time, version, busy, generator):
        if not places:
            return
        taken = {*busy, *flight["clients"].tolist()}
        free = [client for client in range(everybody) if client not in taken]
        for place, chosen in zip(places, generator.permutation(len(free)).tolist()):
            flight["clients"][place], flight["versions"][place] = free[chosen], version
            flight["ends"][place] = time + durations[free[chosen]]

    def starts(state, found):
        own = [slot if not began else m for slot, began in zip(found.slots, found.began)]  # the last row is the newest
        rows = upload(torch.tensor(own), fed.data.device)
        return {n: torch.cat([t, state["global"][n][None]]).index_select(0, rows) for n, t in state["begun"].items()}

    def sample(state, rng):
        return events(state, rng).clients

    def send(state, clients, rng):
        return {"model": starts(state, events(state, rng))}

    def server(state, clients, update, rng):
        found, old = events(state, rng), state["global"]
        version = int(state["clock"]["version"])
        before = state["flight"]["versions"].tolist()
        begun = [version if began else before[slot] for slot, began in zip(found.slots, found.began)]
        stale = version - torch.tensor(begun, dtype=torch.float64)
        weights = upload((1 + stale) ** -options.staleness, fed.data.device)
        start, arrived = starts(state, found), [float(size > 0) for size in update.sizes]
        moved = {
            n: old[n] + of_shape(options.lr * weights, start[n]) * (update.received[n] - start[n])
            for n in fed.trainable
        }
        new = fed.average({**update.received, **moved}, arrived)
        models = {}
        for name, tensor in state["begun"].items():
            rows = tensor.clone()
            for slot in set(found.slots):
                rows[slot] = new[name] if slot in found.fresh else old[name]
            models[name] = rows
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
