"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data"
(AISTATS 2017), algorithm 1.
"""

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.federation import Federation
from fl.federation.own import shared
from surgery import broadcast


def fedavg(fed: Federation) -> Algorithm:
    """Send one model to all, train, average by the number of samples.

    Floating-point buffers (batch-norm statistics) are averaged with the parameters.
    """

    def init():
        return {"global": fed.initial()}

    def round(server, clients, rng):
        trained = fed.train(broadcast(server["global"], len(clients)), clients, rng)
        return {"global": fed.average(trained.received, trained.sizes)}, trained

    def predict(server, images, client=None):
        return fed.predict(server["global"], images)

    return Algorithm(init, round, predict, own=lambda server: shared(server["global"], len(fed.clients)))


METHOD = Method(fedavg)
