"""SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning" (ICML 2020),
algorithm 1, with option II for the control variates.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Any

from torch import Tensor

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.progress import check_plain, expand_like, gradients_of
from fl.base.settings import number
from fl.engine.objectives import Batch, Call, Objective
from fl.federation import Federation
from fl.federation.clients import CLIENTS
from surgery import State, broadcast
from surgery.transfer import upload


@dataclass(frozen=True)
class ScaffoldOptions:
    """SCAFFOLD."""

    lr: Annotated[float, number(float, above=0)] = 1.0
    """learning rate of the server (the paper: 1)"""


def shift(objective: Objective) -> Objective:
    """Return the objective, with its gradient shifted by context["shift"]."""

    def moved(call: Call, params: State, context: Any, batch: Batch) -> Tensor:
        shift = sum((context["shift"][name] * tensor).sum() for name, tensor in params.items())
        return objective(call, params, context, batch) + shift - shift.detach()

    return moved


def scaffold(fed: Federation, options: ScaffoldOptions = ScaffoldOptions()) -> Algorithm:
    """FedAvg; clients correct each gradient by c - c_i: the direction of all clients, minus their own.

    A client's control variate c_i, which it keeps, is the mean gradient of its last training (option II); c on the
    server is the mean over all clients. Both begin at 0. The server makes the change of c_i from the model that it
    receives, so that clients send one model, and receive a model and c. Clients count alike, as in the paper. With
    momentum, which the paper does not have, gradients are counted as in FedNova.

    In the first round this is FedAvg with equal weights.
    """
    check_plain(fed, "scaffold")
    objective = shift(fed.local.objective)

    def mean_gradients(start, trained, steps, rng):  # (x - y_i) / (K_i eta)
        rate = fed.local.optimizer.lr * fed.local.schedule(rng.round)
        counts = (gradients_of(fed, steps) * rate).clamp(min=1e-30)  # a schedule may end at 0: no client moves
        counts = upload(counts, fed.data.device)
        return {name: (start[name] - trained[name]) / expand_like(counts, trained[name]) for name in fed.trainable}

    def init():
        return {"global": fed.initial(), "control": fed.zeros(), CLIENTS: fed.client_states(fed.zeros())}

    def send(server, clients, rng):
        return {
            "model": broadcast(server["global"], len(clients)),
            "control": broadcast(server["control"], len(clients)),
        }

    def client(message, client_states, clients, rng):
        start, control = message["model"], message["control"]
        shift = {name: control[name] - tensor for name, tensor in client_states.items()}
        update = fed.train(start, clients, rng, objective, {"shift": shift})
        mean = mean_gradients(start, update.states, update.steps, rng)
        return update._replace(client_states={name: mean[name] - shift[name] for name in shift})

    def aggregate(server, clients, update, rng):
        old, control = server["global"], server["control"]
        arrived = update.arrived
        mean = fed.average(update.received, arrived)
        start = broadcast(old, len(clients))
        change = {n: g - control[n] for n, g in mean_gradients(start, update.received, update.steps, rng).items()}
        share = sum(arrived) / len(fed.clients)
        moved = {n: old[n] + options.lr * (mean[n] - old[n]) for n in control}
        average = fed.average(change, arrived)
        return {"global": mean | moved, "control": {n: tensor + share * average[n] for n, tensor in control.items()}}

    return replace(fedavg(fed), init=init, send=send, client=client, aggregate=aggregate)


METHOD = Method(scaffold, ScaffoldOptions(), lacks={"changed_updates"})
