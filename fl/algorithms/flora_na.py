"""FLoRA-NA: Nguyen et al., "Communication-Efficient and Accurate Approach for Aggregation in Federated Low-Rank
Adaptation" (arXiv 2509.26399, 2025): the server's problem. Here it is solved by alternating least squares.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.adapters import global_ranks
from fl.federation import Federation
from surgery import unstack
from surgery.adapters import resize
from surgery.adapters.rank import factors

SWEEPS = 50


def flora_na(fed: Federation) -> Algorithm:
    """Send A = Σ p_k A_k and B = Σ q_k B_k, whose product is as near as can be to the mean of clients' products.

    Clients count by their samples in that mean, and in the mean of what is trained whole. The numbers p and q are those
    of one adapter, and may be negative.

    Raises:
        FLError: for a model without adapters.
    """
    ranks = global_ranks(fed, "flora_na combines both matrices of adapters")
    widest = max(ranks.values(), default=1)

    def server(state, clients, update, rng):
        states = [one for one, size in zip(unstack(update.received), update.sizes) if size]
        sizes = torch.tensor([size for size in update.sizes if size], dtype=torch.float64)
        alike = [factors(resize(one, widest, how="truncate").state)[0] for one in states]
        inner_a, inner_b = [], []
        for module in ranks:
            a = torch.stack([one[module].a.flatten(1) for one in alike]).double()
            b = torch.stack([one[module].b.flatten(1).T for one in alike]).double()
            for one, inner in ((a, inner_a), (b, inner_b)):
                inner.append(torch.einsum("jxn,kyn->jkxy", one, one))
        p, q, lost = combine(torch.stack(inner_a).cpu(), torch.stack(inner_b).cpu(), sizes / sizes.sum())
        mean, found = fed.average(update.received, update.sizes), [factors(one)[0] for one in states]
        for m, module in enumerate(ranks):
            names = found[0][module].names
            for name, factor, numbers in zip(names, ("a", "b"), (p[m], q[m])):
                every = torch.stack([getattr(one[module], factor) for one in found])
                mean[name] = torch.tensordot(numbers.to(every), every, 1)
        return {"global": mean}, {"lost": float(lost.mean())}

    return replace(fedavg(fed), server=server)


def combine(inner_a: Tensor, inner_b: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers p and q [M, K] that make ||(Σ q_k B_k)(Σ p_k A_k) - Σ shares_k B_k A_k|| small, for M adapters.

    Each of the two is a problem of least squares if the other is known. Both begin as the shares (FedIT), and each step
    is the shortest one to a solution, so that what says nothing about them leaves them as they are.

    Args:
        inner_a: A_j A_k^T of the K clients, [M, K, K, rank, rank]. No product of the layer's size is needed.
        inner_b: B_j^T B_k, likewise.
        shares: of the clients in the mean of products [K].

    Returns:
        p, q, and the error that is left over, divided by the norm of the mean of products (0 if that is 0) [M].

    >>> one = torch.ones(1, 1, 1, 1, 1, dtype=torch.float64)  # of one client
    >>> [each.tolist() for each in combine(one, one, torch.ones(1, dtype=torch.float64))]
    [[[1.0]], [[1.0]], [0.0]]
    """
    p = q = shares.expand(len(inner_a), -1)
    for _ in range(SWEEPS):
        q = _solved(*_normal(inner_b, inner_a, p, shares), q)
        h, c = _normal(inner_a, inner_b, q, shares)
        p = _solved(h, c, p)
    whole = torch.einsum("j,k,mjkxy,mjkxy->m", shares, shares, inner_a, inner_b)
    left = torch.einsum("mj,mk,mjk->m", p, p, h) - 2 * (p * c).sum(1) + whole
    return p, q, torch.where(whole > 0, left.clamp(min=0) / whole, 0).sqrt()


def _normal(inner: Tensor, other: Tensor, known: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """The normal equations H x = c of one of the two, [M, K, K] and [M, K]."""
    joint = torch.einsum("mj,mjkxy->mkxy", known, other)
    h = torch.einsum("mjkxy,mxy->mjk", inner, torch.einsum("mk,mkxy->mxy", known, joint))
    return h, torch.einsum("mjkxy,mkxy->mj", inner, shares.view(-1, 1, 1) * joint)


def _solved(h: Tensor, c: Tensor, x: Tensor) -> Tensor:
    """The solution that is nearest to x."""
    short = (c - torch.einsum("mjk,mk->mj", h, x)).unsqueeze(-1)
    return x + (torch.linalg.pinv(h, hermitian=True, rtol=1e-12) @ short).squeeze(-1)


METHOD = Method(
    flora_na,
    columns={"lost": float},
    refuses={
        "tampering": "combines clients' matrices with numbers of its own, which rules do not know",
        "privacy": "looks at the matrices of each client",
    },
)
