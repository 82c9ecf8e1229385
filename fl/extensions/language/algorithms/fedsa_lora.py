"""FedSA-LoRA: Guo et al., "Selective Aggregation for Low-Rank Adaptation in Federated Learning" (ICLR 2025), Eq. 3."""

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.split import split
from fl.extensions.language.joining import global_ranks
from fl.federation import Federation
from surgery.adapters import adapted_layers


def fedsa_lora(fed: Federation) -> Algorithm:
    """FedAvg of the adapters' A alone; each client keeps its own B.

    What is trained whole beside the adapters, such as a classifier, is averaged.

    Raises:
        FLError: for a model without adapters.
    """
    every = {id(layer.factors[1]) for _, layer in adapted_layers(fed.model)}
    private = {name for name, parameter in fed.model.named_parameters() if id(parameter) in every}
    global_ranks(fed, "fedsa_lora averages one matrix of each adapter")
    return split(fed, private)


METHOD = Method(fedsa_lora, clients="personalized")  # fmt: skip
