"""A method of one's own, FedAvg that goes only a share of the way to the mean: `python examples/method.py`."""

from dataclasses import replace

import fl
from fl.algorithms import ALGORITHMS
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.method import Method

SHARE = 0.8


def careful(fed: fl.Federation) -> fl.Algorithm:
    def aggregate(server, clients, update, rng):
        before, mean = server["global"], fed.average(update.received, update.sizes)
        return {"global": {name: before[name] + SHARE * (mean[name] - before[name]) for name in before}}

    return replace(fedavg(fed), aggregate=aggregate)


ALGORITHMS["careful"] = Method(careful)
summary = fl.simulate(fl.Config.of(algorithm="careful", clients=10, rounds=10, width=0.5), "runs/careful")
print(f"accuracy {summary['final']['accuracy']:.1%}")
