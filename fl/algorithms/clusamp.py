"""CluSamp: Fraboni et al., "Clustered Sampling: Low-Variance and Improved Representativity for Clients Selection in
Federated Learning" (ICML 2021), algorithm 2: clients that learn alike are clustered, and each cluster sends one.
"""

import os
from dataclasses import replace

import numpy as np
import torch

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.client_sampling import distributions, draw_each, similarity_tree
from fl.base.errors import FLError
from fl.federation import Federation
from surgery.transfer import upload


def clusamp(fed: Federation) -> Algorithm:
    """FedAvg whose clients are drawn from K distributions over similar clients; the K models have equal weights.

    A client's expected weight is its share of the samples, whatever the clusters, so the average is unbiased. Clients
    are compared by the angle between their representative gradients, as in the paper's experiments (FedMR's released
    code takes L1 distances). A client's gradient is what it changed in the trained parameters when it last took part.
    It is zero for a client that never did, which makes it equal to all others that never did, and puts it at a right
    angle to the rest; in the authors' code it is equal to everybody. That code also clusters the rows of the matrix of
    angles as if they were points, where this one takes the angles as distances. And what is left over fills the
    smallest distribution first there, while here the largest group comes first.

    A large client, or one in several distributions, may be drawn several times in a round. It then trains several
    times, with the same result, and counts as often as it was drawn, in the metrics too. A client that is dropped keeps
    its former gradient, and the remaining models have equal weights.

    The server keeps a gradient of every client in float32: n * P numbers, which are in every checkpoint, too, and take
    twice the memory while they are replaced. It also needs n * n angles.

    Raises:
        FLError: if that is more than the memory of the device.
    """
    learnt, n = fed.trainable, len(fed.clients)
    sizes = np.array([len(fed.clients.train[c]) for c in range(n)], dtype=np.int64)

    def init():
        numbers, device = sum(p.numel() for p in learnt.values()), fed.data.x.device
        needed, there = 2 * 4 * n * numbers + 4 * 8 * n * n, memory(device)
        if needed > there:
            raise FLError(
                f"CluSamp keeps a gradient of every client: for {n} clients x {numbers:,} parameters it needs "
                f"{needed / 2**30:,.1f} GiB, and {device} has {there / 2**30:,.1f}; take fewer clients, a narrower "
                "model (--width), or leave clusamp out of --algorithm"
            )
        gradients = {name: torch.zeros(n, *p.shape, device=p.device) for name, p in learnt.items()}
        return {"global": fed.initial(), "gradients": gradients}

    def sample(state, rng):
        return draw_each(distributions(sizes, similarity_tree(state["gradients"]), fed.participants), rng)

    def server(state, clients, update, rng):
        received, kept = update.received, [size > 0 for size in update.sizes]
        seen = {client: k for k, (client, keep) in enumerate(zip(clients, kept)) if keep}  # each once
        rows, entries = upload(torch.tensor([list(seen), list(seen.values())]), fed.data.x.device)
        gradients = {}
        for name, before in state["gradients"].items():
            change = received[name].index_select(0, entries) - state["global"][name]
            gradients[name] = before.index_copy(0, rows, change.float().nan_to_num())  # of huge weights it overflows
        return {"global": fed.average(received, kept), "gradients": gradients}

    return replace(fedavg(fed), init=init, server=server, sample=sample)


def memory(device: torch.device) -> int:
    """All of the device's memory, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


METHOD = Method(clusamp, refuses={"presence": "draws its clients itself, from all of them"})
