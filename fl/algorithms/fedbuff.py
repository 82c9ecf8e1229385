"""FedBuff: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation" (AISTATS 2022), algorithm 1."""

from dataclasses import dataclass, replace
from typing import Annotated

import torch

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.flight import Clock
from fl.algorithms.parts.progress import of_shape
from fl.base.errors import FLError
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
    simulation = Clock(fed.seconds(range(everybody)), m, k)

    def init():
        start = fed.initial()
        clock = {"version": torch.tensor(0), "time": torch.tensor(0.0, dtype=torch.float64)}
        return {"global": start, "begun": broadcast(start, m), "flight": simulation.begin(), "clock": clock}

    def events(state, rng, clients=None):
        version, time = int(state["clock"]["version"]), float(state["clock"]["time"])
        return simulation.events(state["flight"], version, time, rng, clients)

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
        begun = {name: tensor.clone() for name, tensor in state["begun"].items()}
        for model, slots in ((old, found.replaced), (new, found.fresh)):
            for name, tensor in begun.items():
                for slot in slots:
                    tensor[slot] = model[name]
        clock = {"version": torch.tensor(version + 1), "time": torch.tensor(found.time, dtype=torch.float64)}
        metrics = {"staleness": stale.mean().item(), "simulated_seconds": found.time - float(state["clock"]["time"])}
        return {"global": new, "begun": begun, "flight": found.flight, "clock": clock}, metrics

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
