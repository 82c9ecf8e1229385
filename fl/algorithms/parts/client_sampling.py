"""Clustered sampling of clients: Fraboni et al., "Clustered Sampling: Low-Variance and Improved Representativity for
Clients Selection in Federated Learning" (ICML 2021), algorithm 2.
"""

from itertools import chain

import numpy as np
import torch

from fl.base.rng import Rng
from surgery import Stack
from surgery.transfer import download


def similarity_tree(gradients: Stack) -> np.ndarray:
    """Ward's hierarchical clustering of n gradients by the angles between them: merges [n - 1, 2].

    Row i merges two nodes into node n + i; the nodes below n are the gradients.

    >>> similarity_tree({"w": torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.1]])}).tolist()
    [[0, 2], [1, 3]]
    """
    from scipy.cluster.hierarchy import linkage

    products = sum(rows @ rows.T for rows in (tensor.flatten(1) for tensor in gradients.values())).double()
    lengths = products.diagonal().sqrt()
    cosines = products / torch.outer(lengths, lengths)  # not finite: never seen, or too large
    found, zero = download([cosines.nan_to_num(0).clamp(-1, 1).arccos(), lengths == 0])
    angles, n, unseen = found.numpy(), len(found), zero.bool().numpy()
    angles[np.ix_(unseen, unseen)] = 0
    if n == 1:
        return np.empty((0, 2), dtype=np.int64)
    return linkage(angles[np.triu_indices(n, 1)], "ward")[:, :2].astype(np.int64)


def distributions(sizes: np.ndarray, merges: np.ndarray, k: int) -> np.ndarray:
    """Algorithm 2: K distributions over the n clients, in samples: integers [K, n].

    With M samples in all, each row sums to M exactly, and the column of a client with m samples to K * m. A client with
    M / K samples or more gets rows of its own; what is left of it is clustered with the others. The tree falls into
    groups, none larger than a row. Each of the largest groups begins a row, and the others fill the room that is left.

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
    found = sorted(groups(mass, merges, total), key=lambda group: -mass[group].sum())
    for r, group in enumerate(found[: k - row], row):
        table[r, group] = mass[group]
    room = total - table.sum(1)
    for client in chain.from_iterable(found[k - row :]):
        while mass[client]:
            if not room[row]:
                row += 1
            part = min(room[row], mass[client])
            table[row, client] += part
            room[row] -= part
            mass[client] -= part
    return table


def groups(mass: np.ndarray, merges: np.ndarray, limit: int) -> list[list[int]]:
    """The fewest subtrees that together hold all leaves. None weighs more than the limit, unless it is a single leaf.

    >>> groups(np.array([1, 1, 1]), np.array([[0, 2], [1, 3]]), 2)
    [[1], [0, 2]]
    """
    members = {leaf: [leaf] for leaf in range(len(mass))}
    for node, (a, b) in enumerate(merges.tolist(), len(mass)):
        if a in members and b in members and mass[members[a]].sum() + mass[members[b]].sum() <= limit:
            members[node] = members.pop(a) + members.pop(b)
    return list(members.values())


def draw_each(table: np.ndarray, rng: Rng) -> list[int]:
    """One client from each distribution, drawn independently: K clients, some of which may be the same."""
    generator = rng.numpy("clusamp")
    return [int(np.searchsorted(row.cumsum(), generator.integers(row.sum()), side="right")) for row in table]
