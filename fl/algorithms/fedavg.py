"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data"
(AISTATS 2017), algorithm 1.
"""

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.federation import Federation


def fedavg(fed: Federation) -> Algorithm:
    """Send one model to all, train, average by the number of samples.

    Floating-point buffers (batch-norm statistics) are averaged with the parameters.
    """

    def init():
        return {"global": fed.initial()}

    def client(message, client_states, clients, rng):
        return fed.train(message["model"], clients, rng)

    def aggregate(server, clients, update, rng):
        return {"global": fed.average(update.received, update.sizes)}

    return Algorithm(fed, init, client, aggregate)


METHOD = Method(fedavg, mean_only=True)
