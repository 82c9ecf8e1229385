"""FlexLoRA: Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources"
(NeurIPS 2024), section 3.2.
"""

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.extensions.language.joining import global_ranks, rank_algorithm, select_arrived
from fl.federation import Federation
from surgery.adapters import rank_of, resize, stack


def flexlora(fed: Federation) -> Algorithm:
    """Average the products of clients' adapters, of any ranks, and send each client the best of its rank.

    The mean of products B A is stacked exactly, and cut to the largest rank by its singular values, the largest first:
    a client's first rows of A and columns of B are then the best adapter of its rank. Clients count by their samples.

    Raises:
        FLError: for a model without adapters.
    """
    ranks = global_ranks(fed, "flexlora averages the products of adapters, both of whose matrices are trained")

    def aggregate(server, clients, update, rng):
        stacked = stack(*select_arrived(update))
        joint = rank_of(stacked)
        best, lost = resize(stacked, {module: min(rank, joint[module]) for module, rank in ranks.items()})
        mean, _ = resize(best, ranks, generator=rng.torch("rows"), how="truncate")  # few clients have fewer ranks
        return {"global": mean}, {"lost": sum(lost.values()) / len(lost)}

    return rank_algorithm(fed, aggregate)


METHOD = Method(flexlora, clients="heterogeneous", columns={"lost": float}, lacks={"plain_average"})
