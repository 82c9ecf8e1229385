"""FedNova: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization"
(NeurIPS 2020), section 4.
"""

from dataclasses import replace

from torch import tensor

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.progress import check_plain, expand_like, gradients_of
from fl.federation import Federation
from surgery.transfer import upload


def fednova(fed: Federation) -> Algorithm:
    """FedAvg that divides each client's update by the number of its steps, so that long training does not count twice.

    The mean of these, by the clients' samples, is multiplied by the mean number of steps (tau_eff). Momentum is counted
    as the paper does: a gradient moves a client in all later steps as well. Buffers (batch-norm statistics) are
    averaged as in FedAvg.

    With equally many steps for all clients this is FedAvg, but for rounding.
    """
    check_plain(fed, "fednova")

    def aggregate(server, clients, update, rng):
        old = server["global"]
        counts = gradients_of(fed, update.steps)
        weights = tensor(update.sizes, dtype=counts.dtype)
        factors = (weights @ counts) / weights.sum() / counts  # tau_eff / ||a_i||_1
        factors = upload(factors, fed.data.device)
        scaled = {
            n: old[n] + expand_like(factors, update.received[n]) * (update.received[n] - old[n]) for n in fed.trainable
        }
        return {"global": fed.average({**update.received, **scaled}, update.sizes)}

    return replace(fedavg(fed), aggregate=aggregate)


METHOD = Method(fednova, lacks={"plain_average"})
