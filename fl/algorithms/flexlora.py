"""FlexLoRA: Bai et al., "Federated Fine-tuning of Large Language Models under Heterogeneous Tasks and Client Resources"
(NeurIPS 2024), section 3.2.
"""

from dataclasses import replace

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.submodels import extract_all, models_of
from fl.base.errors import FLError
from fl.federation import Federation
from surgery.adapters import rank_of, resize, stack


def flexlora(fed: Federation) -> Algorithm:
    """Average the products of clients' adapters, of any ranks, and send each client the best of its rank.

    The mean of products B A is stacked exactly, and cut to the largest rank by its singular values, the largest first:
    a client's first rows of A and columns of B are then the best adapter of its rank. Clients count by their samples.

    Raises:
        FLError: for a model without adapters.
    """
    fleet = fed.fleet_or_uniform
    start = fed.initial()
    if not any(name.endswith(("lora_A.weight", "lora_embedding_A")) for name in start):
        raise FLError(
            "flexlora averages the products of adapters, both of whose matrices are trained, and there are none: give "
            "--adapters.kind lora and --adapters.learn both"
        )
    ranks = rank_of(start)

    def plan(client):
        return fleet[client].plan

    def send(state, clients, rng):
        return {"model": extract_all(state["global"], [plan(client) for client in clients])}

    def server(state, clients, update, rng):
        arrived = [(one, size) for one, size in zip(update.received, update.sizes) if size]
        stacked = stack(*zip(*arrived))
        joint = rank_of(stacked)
        best, lost = resize(stacked, {module: min(rank, joint[module]) for module, rank in ranks.items()})
        mean, _ = resize(best, ranks, generator=rng.torch("rows"), how="truncate")  # few clients have fewer ranks
        return {"global": mean}, {"lost": sum(lost.values()) / len(lost)}

    return replace(fedavg(fed), send=send, server=server, models=models_of(fed, plan), plan=plan)


METHOD = Method(
    flexlora,
    clients="heterogeneous",
    columns={"lost": float},
    refuses={"tampering": "averages products of matrices, which rules for whole models do not know"},
)
