"""FedBN: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization" (ICLR 2021),
algorithm 1.
"""

from torch import nn

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.split import split
from fl.base.errors import FLError
from fl.federation import Federation


def fedbn(fed: Federation) -> Algorithm:
    """FedAvg without the batch norms: their weights, biases and running statistics never leave a client.

    Raises:
        FLError: for a model without batch norms, which would be FedAvg.
    """
    norms = [name for name, module in fed.model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    private = {f"{norm}.{name}" for norm in norms for name in fed.model.get_submodule(norm).state_dict()}
    if not private:
        raise FLError(
            f"fedbn keeps batch norms at the clients, and {type(fed.model).__name__} has none: take --norm batch, or "
            "another --model or --algorithm",
            code="unsupported",
        )
    return split(fed, private)


METHOD = Method(fedbn, clients="personalized")
