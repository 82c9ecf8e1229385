"""Models with a part that clients share and a part that never leaves its client."""

from collections.abc import Collection, Mapping

from torch import Tensor

from fl.algorithms.algorithm import Algorithm
from fl.federation import Federation
from fl.federation.client_models import share_model
from fl.federation.clients import CLIENTS
from surgery import State, broadcast


def split(fed: Federation, private: Collection[str]) -> Algorithm:
    """FedAvg, except for tensors that clients keep; these start as the initial ones.

    A client that was dropped keeps what it had. It predicts with the global part and its own, which is the initial one
    if it never took part.

    The global model that a stranger would get has the mean of what the participants keep. A real server does not know
    that, and its global model has the initial part there. No client trains from that mean, and it does not count as
    traffic.

    Args:
        private: names of the tensors that never leave a client.
    """
    names = list(fed.initial())

    def init():
        start = fed.initial()
        return {"global": start, CLIENTS: fed.client_states({name: start[name] for name in names if name in private})}

    def send(server, clients, rng):
        return {"model": broadcast(without(server["global"], private), len(clients))}

    def client(message, client_states, clients, rng):
        update = fed.train(join(message["model"], client_states), clients, rng)
        own_states = {name: update.states[name] for name in client_states}
        return update._replace(received=without(update.received, private), client_states=own_states)

    def aggregate(server, clients, update, rng):
        mean = dict(server["global"])
        # One after the other: a server does not know the clients' parts.
        for models in filter(None, (update.received, update.client_states)):
            known = {name: server["global"][name] for name in models}  # if no update has arrived
            mean |= fed.average(models, update.sizes, fallback=known)
        return {"global": mean}

    def join(rest, part):
        return {name: part[name] if name in part else rest[name] for name in names}

    def models(server):
        return share_model(without(server["global"], private), len(fed.clients))

    def personalize(models, client_states, clients, rng):
        return join(models, client_states)

    return Algorithm(fed, init, client, aggregate, send, models=models, personalize=personalize)


def without(state: Mapping[str, Tensor], names: Collection[str]) -> State:
    """Return the state without the tensors of these names.

    >>> without({"body": 1, "head": 2}, ["head"])
    {'body': 1}
    """
    return {name: tensor for name, tensor in state.items() if name not in names}
