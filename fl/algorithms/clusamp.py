"""CluSamp: Fraboni et al., "Clustered Sampling: Low-Variance and Improved Representativity for Clients Selection in
Federated Learning" (ICML 2021), algorithm 2: clients that learn alike are clustered, and each cluster sends one.
"""

import os
from dataclasses import replace
from itertools import chain

import numpy as np
import torch

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.federation import Federation
from surgery import Stack
from surgery.transfer import double, download, upload


def clusamp(fed: Federation) -> Algorithm:
    """FedAvg; clients are sampled from K distributions over similar clients, and the K models have equal weights.

    A client's expected weight is its share of the samples, whatever the clusters, so the average is unbiased. Clients
    are compared by the angle between their representative gradients, as in the paper's experiments (FedMR's released
    code takes L1 distances). A client's gradient is what it changed in the trained parameters when it last took part.
    The gradient of a client that never took part is 0: its distance is 0 to clients like it, and a right angle to the
    others. In the authors' code its distance to all clients is 0. That code also clusters the rows of the matrix of
    angles as if they were points; here the angles are distances. There, what is left over fills the smallest
    distribution first; here the largest group comes first.

    A large client, or one in several distributions, may be sampled several times in a round. It then trains several
    times, with the same result, and counts as often as it was sampled, in the metrics too. A dropped client keeps its
    former gradient, and the remaining models have equal weights.

    The server keeps a gradient of every client in float32: n * P numbers, which are in every checkpoint, too, and take
    twice the memory while they are replaced. It also needs n * n angles.

    Raises:
        FLError: if that is more than the memory of the device.
    """
    learnt, n = fed.trainable, len(fed.clients)
    sizes = np.array([len(fed.clients.train[c]) for c in range(n)], dtype=np.int64)

    def init():
        numbers, device = sum(p.numel() for p in learnt.values()), fed.data.device
        needed, there = 2 * 4 * n * numbers + 4 * 8 * n * n, memory(device)
        if needed > there:
            raise FLError(
                f"CluSamp keeps a gradient of every client: for {n} clients x {numbers:,} parameters it needs "
                f"{needed / 2**30:,.1f} GiB, and {device} has {there / 2**30:,.1f}; take fewer clients, a narrower "
                "model (--width), or leave clusamp out of --algorithm",
                code="memory",
            )
        gradients = {name: torch.zeros(n, *p.shape, device=p.device) for name, p in learnt.items()}
        return {"global": fed.initial(), "gradients": gradients}

    def sample(server, rng):
        return draw_each(distributions(sizes, similarity_tree(server["gradients"]), fed.participants), rng)

    def aggregate(server, clients, update, rng):
        received, arrived = update.received, update.arrived
        seen = {client: k for k, (client, keep) in enumerate(zip(clients, arrived)) if keep}  # each once
        rows, entries = upload(torch.tensor([list(seen), list(seen.values())]), fed.data.device)
        gradients = {}
        for name, before in server["gradients"].items():
            change = received[name].index_select(0, entries) - server["global"][name]
            gradients[name] = before.index_copy(0, rows, change.float().nan_to_num())  # of huge weights it overflows
        return {"global": fed.average(received, arrived), "gradients": gradients}

    return replace(fedavg(fed), init=init, aggregate=aggregate, sample=sample)


def similarity_tree(gradients: Stack) -> np.ndarray:
    """Cluster n gradients by their angles with Ward's method: merges [n - 1, 2].

    Row i merges two nodes into node n + i; the nodes below n are the gradients.

    >>> similarity_tree({"w": torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.1]])}).tolist()
    [[0, 2], [1, 3]]
    """
    from scipy.cluster.hierarchy import linkage

    products = double(sum(rows @ rows.T for rows in (tensor.flatten(1) for tensor in gradients.values())))
    lengths = products.diagonal().sqrt()
    cosines = products / torch.outer(lengths, lengths)  # not finite: never seen, or too large
    distances, zero = download([cosines.nan_to_num(0).clamp(-1, 1).arccos(), lengths == 0])
    angles, n, unseen = distances.numpy(), len(distances), zero.bool().numpy()
    angles[np.ix_(unseen, unseen)] = 0
    if n == 1:
        return np.empty((0, 2), dtype=np.int64)
    return linkage(angles[np.triu_indices(n, 1)], "ward")[:, :2].astype(np.int64)


def distributions(sizes: np.ndarray, merges: np.ndarray, k: int) -> np.ndarray:
    """Algorithm 2: K distributions over the n clients, in samples: integers [K, n].

    With M samples in all, each row sums to M exactly, and the column of a client with m samples to K * m. A client with
    M / K samples or more gets rows of its own; what is left of it is clustered with the others. The tree falls into
    groups, none larger than a row. Each of the largest groups begins a row, and the others fill what is left of it.

    Args:
        sizes: the clients' numbers of samples [n].
        merges: the tree to cut, as `similarity_tree` returns it.

    >>> distributions(np.array([3, 1, 1, 3]), np.array([[0, 3], [1, 2], [4, 5]]), 2).tolist()
    [[6, 2, 0, 0], [0, 0, 2, 6]]
    """
    total, mass = int(sizes.sum()), k * sizes
    table = np.zeros((k, len(sizes)), dtype=np.int64)
    row = 0
    for client in np.flatnonzero(mass >= total):
        whole = mass[client] // total
        table[row : row + whole, client] = total
        row += whole
        mass[client] -= whole * total
    by_size = sorted(groups(mass, merges, total), key=lambda group: -mass[group].sum())
    for r, group in enumerate(by_size[: k - row], row):
        table[r, group] = mass[group]
    room = total - table.sum(1)
    for client in chain.from_iterable(by_size[k - row :]):
        while mass[client]:
            if not room[row]:
                row += 1
            part = min(room[row], mass[client])
            table[row, client] += part
            room[row] -= part
            mass[client] -= part
    return table


def groups(mass: np.ndarray, merges: np.ndarray, limit: int) -> list[list[int]]:
    """Return the fewest subtrees that together hold all leaves.

    None weighs more than the limit, unless it is a single leaf.

    >>> groups(np.array([1, 1, 1]), np.array([[0, 2], [1, 3]]), 2)
    [[1], [0, 2]]
    """
    members = {leaf: [leaf] for leaf in range(len(mass))}
    for node, (a, b) in enumerate(merges.tolist(), len(mass)):
        if a in members and b in members and mass[members[a]].sum() + mass[members[b]].sum() <= limit:
            members[node] = members.pop(a) + members.pop(b)
    return list(members.values())


def draw_each(table: np.ndarray, rng: Rng) -> list[int]:
    """Sample one client from each distribution: K clients, perhaps with repetitions."""
    generator = rng.numpy("clusamp")
    return [int(np.searchsorted(row.cumsum(), generator.integers(row.sum()), side="right")) for row in table]


def memory(device: torch.device) -> int:
    """Return all of the device's memory, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


METHOD = Method(clusamp, lacks={"uniform_sampling"})
