"""Partitions as one would write them down: a tensor a client, dealt out client by client."""

import numpy as np
import torch

from fl.partition import Split
from fl.partition.classes import deal_classes, nested


def tensors(parts):
    return [torch.from_numpy(np.sort(part)) for part in parts]


def hold_out(parts, valid, test, rng):
    splits = []
    for part in parts:
        n = len(part)
        v, t = (max(1, round(share * n)) if share else 0 for share in (valid, test))
        order = part[torch.from_numpy(rng.permutation(n))] if v + t else part
        splits.append(Split(*(piece.sort().values for piece in order.split([n - v - t, v, t]))))
    return splits


def unequal(n, clients, rng):
    shares = rng.uniform(1, 2, clients)
    sizes = np.diff((np.cumsum(shares) / shares.sum() * n).round().astype(np.int64), prepend=0)
    while sizes.max() > 2 * sizes.min():
        sizes[sizes.argmax()] -= 1
        sizes[sizes.argmin()] += 1
    return sizes


def iid(n, clients, rng, is_unequal):
    equal = [n // clients + (k < n % clients) for k in range(clients)]
    sizes = unequal(n, clients, rng) if is_unequal else equal
    return tensors(np.split(rng.permutation(n), np.cumsum(sizes)[:-1]))


def dirichlet(y, clients, alpha, rng):
    """The first draw."""
    parts = [[] for _ in range(clients)]
    sizes = np.zeros(clients, dtype=np.int64)
    for label in np.unique(y):
        members = rng.permutation(np.flatnonzero(y == label))
        open_ = sizes < len(y) / clients
        share = rng.dirichlet(np.full(clients, alpha)) * open_
        share = share / share.sum() if share.sum() > 0 else open_ / open_.sum()
        cuts = (np.cumsum(share)[:-1] * len(members)).astype(np.int64)
        for client, piece in enumerate(np.split(members, cuts)):
            parts[client].append(piece)
            sizes[client] += len(piece)
    return tensors(map(np.concatenate, parts))


def shards(y, clients, share, rng):
    classes = np.unique(y)
    held = deal_classes(len(classes), clients, max(1, round(share * len(classes))), rng)
    holders = np.bincount(held.ravel(), minlength=len(classes))
    members = [rng.permutation(np.flatnonzero(y == label)) for label in classes]
    count = min(len(m) // h for m, h in zip(members, holders, strict=True) if h)
    taken = np.zeros(len(classes), dtype=np.int64)
    parts = []
    for mine in held:
        parts.append(np.concatenate([members[c][taken[c] : taken[c] + count] for c in mine]))
        taken[mine] += count
    return tensors(parts)


def clusters(y, clients, counts, classes, rng):
    names = np.unique(y)
    structure = nested(counts, clients)
    pool = rng.permutation(len(names))
    parts = [[] for _ in range(clients)]
    for level, (k, c) in enumerate(zip(counts, classes, strict=True)):
        pool, mine = (pool, pool) if len(counts) == 1 else (pool[k * c :], pool[: k * c])
        dealt = mine[deal_classes(len(mine), k, c, rng)]
        for label in mine:
            owners = np.flatnonzero(np.isin(structure[level], np.flatnonzero((dealt == label).any(1))))
            members = rng.permutation(np.flatnonzero(y == names[label]))
            for client, piece in zip(rng.permutation(owners), np.array_split(members, max(1, len(owners)))):
                parts[client].append(piece)
    return tensors(map(np.concatenate, parts))


def natural(owners, clients, minimum, rng):
    sizes = np.bincount(owners)
    chosen = np.sort(rng.choice(np.flatnonzero(sizes >= max(1, minimum)), clients, replace=False))
    return [torch.from_numpy(np.flatnonzero(owners == owner)) for owner in chosen]
