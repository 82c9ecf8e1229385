"""FLoRA-NA: Nguyen et al., "Communication-Efficient and Accurate Approach for Aggregation in Federated Low-Rank
Adaptation" (arXiv 2509.26399, 2025): the server's problem. Here it is solved by alternating least squares.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.extensions.language.joining import global_ranks
from fl.federation import Federation
from fl.federation.cohort import select
from surgery.adapters.rank import factors
from surgery.transfer import host_copies, upload

SWEEPS = 50


def flora_na(fed: Federation) -> Algorithm:
    """Send A = Σ p_k A_k and B = Σ q_k B_k with the product nearest to the mean of clients' products.

    Clients count by their samples in that mean, and in the mean of what is trained whole. Each adapter has its own
    numbers p and q, which may be negative.

    Raises:
        FLError: for a model without adapters.
    """
    global_ranks(fed, "flora_na combines both matrices of adapters")
    names = [name for adapter in factors(fed.initial())[0].values() for name in adapter.names]

    def aggregate(server, clients, update, rng):
        rows = [row for row, size in enumerate(update.sizes) if size]
        sizes = torch.tensor([update.sizes[row] for row in rows], dtype=torch.float64)
        sent = [select(update.received[name], rows) for name in names]
        # Clients' matrices differ little, so that float32 is not enough, and not every device has more.
        matrices = [tensor.double() for tensor in host_copies(sent)]
        combinations = [
            combine(a.flatten(2), b.flatten(2), sizes / sizes.sum()) for a, b in zip(matrices[::2], matrices[1::2])
        ]
        numbers = upload(
            torch.stack([vector for p, q, _ in combinations for vector in (p, q)]).to(sent[0].dtype), sent[0].device
        )
        mean = fed.average(update.received, update.sizes)
        mean |= {name: torch.tensordot(vector, t, 1) for name, vector, t in zip(names, numbers, sent)}
        return {"global": mean}, {"lost": sum(lost for *_, lost in combinations) / len(combinations)}

    return replace(fedavg(fed), aggregate=aggregate)


def combine(a: Tensor, b: Tensor, shares: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return numbers p and q [K] of the best combination of one adapter's matrices.

    They make ||(Σ q_k B_k)(Σ p_k A_k) - Σ shares_k B_k A_k|| small. Each of the two is a problem of least squares if
    the other is known. Both begin as the shares (FedIT), and each step is the shortest one to a solution, so that what
    says nothing about them leaves them as they are.

    Args:
        a: of the K clients [K, rank, in].
        b: of the same [K, out, rank]. No product of the layer's size is computed.
        shares: of the clients in the mean of products [K].

    Returns:
        p, q, and the error that is left over, divided by the norm of the mean of products (0 if that is 0).

    >>> both = torch.eye(2, dtype=torch.float64)  # the mean of products has rank 2
    >>> p, q, lost = combine(both.view(2, 1, 2), both.view(2, 2, 1), torch.tensor([0.8, 0.2]).double())
    >>> torch.outer(q, p).round(decimals=4).tolist(), round(lost, 4)
    ([[0.8, 0.0], [0.0, 0.0]], 0.2425)
    """
    inner_a = torch.einsum("jxn,kyn->jkxy", a, a)  # A_j A_k^T and B_j^T B_k, which all inner products are made of
    inner_b = torch.einsum("jnx,kny->jkxy", b, b)
    p = q = shares
    for _ in range(SWEEPS):
        before = p, q
        q = _solve(*_normal(inner_b, inner_a, p, shares), q)
        h, c = _normal(inner_a, inner_b, q, shares)
        p = _solve(h, c, p)
        if all(torch.allclose(new, old, rtol=1e-12, atol=1e-12) for new, old in zip((p, q), before)):
            break
    whole = float(torch.einsum("j,k,jkxy,jkxy->", shares, shares, inner_a, inner_b))
    left = float(p @ h @ p - 2 * p @ c) + whole
    return p, q, (max(left, 0.0) / whole) ** 0.5 if whole > 0 else 0.0


def _normal(inner: Tensor, other: Tensor, known: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return the normal equations h x = c of one of the two."""
    joint = torch.einsum("j,jkxy->kxy", known, other)
    h = torch.einsum("jkxy,xy->jk", inner, torch.einsum("k,kxy->xy", known, joint))
    return h, torch.einsum("jkxy,kxy,k->j", inner, joint, shares)


def _solve(h: Tensor, c: Tensor, x: Tensor) -> Tensor:
    """Return the solution that is nearest to x."""
    return x + torch.linalg.pinv(h, hermitian=True, rtol=1e-12) @ (c - h @ x)


METHOD = Method(flora_na, columns={"lost": float}, lacks={"plain_average"})
