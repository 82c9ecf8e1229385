"""FedDyn: Acar et al., "Federated Learning Based on Dynamic Regularization" (ICLR 2021), algorithm 1."""

from dataclasses import dataclass, replace
from typing import Annotated

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.scaffold import shift
from fl.base.settings import number
from fl.engine.objectives import proximal
from fl.federation import Federation
from fl.federation.clients import CLIENTS


@dataclass(frozen=True)
class FedDynOptions:
    """FedDyn."""

    alpha: Annotated[float, number(float, above=0)] = 0.01
    """weight of the dynamic regulariser (the paper: 0.1, 0.01 and 0.001)"""


def feddyn(fed: Federation, options: FedDynOptions = FedDynOptions()) -> Algorithm:
    """Clients minimise the loss - <g_i, w> + alpha/2 ||w - received||^2, so that their optima agree in the end.

    Each client keeps g_i, what its loss's gradient was where it ended: g_i ← g_i - alpha (w_i - received). The server
    keeps h, the mean of all clients' negative g_i, and sends the mean of the models, beyond which h has moved:
    w ← mean - h / alpha. Clients count alike, as in the paper. Buffers (batch-norm statistics) are only averaged.
    """
    objective = proximal(options.alpha, shift(fed.local.objective))

    def init():
        return {"global": fed.initial(), "h": fed.zeros(), CLIENTS: fed.client_states(fed.zeros())}

    def client(message, client_states, clients, rng):
        start = message["model"]
        shift = {name: -gradient for name, gradient in client_states.items()}
        update = fed.train(start, clients, rng, objective, {"anchor": start, "shift": shift})
        moved = {n: g - options.alpha * (update.states[n] - start[n]) for n, g in client_states.items()}
        return update._replace(client_states=moved)

    def aggregate(server, clients, update, rng):
        old = server["global"]
        mean, share = fed.average(update.received, update.arrived), sum(update.arrived) / len(fed.clients)
        h = {name: tensor - options.alpha * share * (mean[name] - old[name]) for name, tensor in server["h"].items()}
        return {"global": mean | {name: mean[name] - tensor / options.alpha for name, tensor in h.items()}, "h": h}

    return replace(fedavg(fed), init=init, client=client, aggregate=aggregate)


METHOD = Method(feddyn, FedDynOptions(), lacks={"changed_updates"})
