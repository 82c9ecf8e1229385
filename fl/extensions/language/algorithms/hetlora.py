"""HetLoRA: Cho et al., "Heterogeneous LoRA for Federated Fine-tuning of On-Device Foundation Models" (EMNLP 2024),
without its rank self-pruning: clients' ranks stay as they were given.
"""

import torch

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.extensions.language.joining import global_ranks, rank_algorithm, select_arrived
from fl.federation import Federation
from surgery import average
from surgery.adapters import rank_of, resize
from surgery.adapters.rank import Factors, factors
from surgery.states import compute_dtype


def hetlora(fed: Federation) -> Algorithm:
    """Fill adapters up with zeros to the largest rank, and average A and B by the norms of clients' products.

    A client gets the first rows of A and columns of B. In the mean of an adapter it counts by the Frobenius norm of its
    product B A there; in the mean of tensors that are trained whole, by its samples.

    Raises:
        FLError: for a model without adapters.
    """
    ranks = global_ranks(fed, "hetlora weighs both matrices of adapters by their products")

    def aggregate(server, clients, update, rng):
        states, sizes = select_arrived(update)
        padded = [resize(state, ranks, how="truncate").state for state in states]
        mean, adapters = average(padded, weights=sizes), [factors(state)[0] for state in padded]
        norms = torch.stack([torch.stack([norm(client[module]) for client in adapters]) for module in ranks]).cpu()
        held = [rank_of(state) for state in states]
        for (module, old), shares in zip(factors(server["global"])[0].items(), norms):
            shares = shares if shares.any() else torch.ones_like(shares)  # no client has learnt anything there
            a, b = average([client[module].state for client in adapters], weights=shares).values()
            most = max(rank[module] for rank in held)  # rows that no client has stay: zeros would never learn again
            a[most:], b[:, most:] = old.a[most:], old.b[:, most:]
            mean |= old._replace(a=a, b=b).state
        return {"global": mean}

    return rank_algorithm(fed, aggregate)


def norm(adapter: Factors) -> torch.Tensor:
    """||B A||, the Frobenius norm, with no matrix of the product's size.

    >>> norm(Factors(("a", "b"), torch.tensor([[3.0, 4.0]]), torch.tensor([[2.0], [0.0]])))
    tensor(10.)
    """
    dtype = compute_dtype(adapter.a.dtype)
    a, b = (torch.linalg.qr(side.to(dtype)).R for side in (adapter.a.flatten(1).T, adapter.b.flatten(1)))
    return torch.linalg.norm(b @ a.T)


METHOD = Method(hetlora, clients="heterogeneous", lacks={"plain_average"})
