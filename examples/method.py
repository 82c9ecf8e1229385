"""A method of one's own, FedAvg that goes only a share of the way to the mean: `python examples/method.py`."""

import fl
from fl.algorithms import ALGORITHMS, fedavg
from fl.algorithms.method import Method
from surgery import broadcast

SHARE = 0.8


def careful(fed: fl.Federation) -> fl.Algorithm:
    def round(server, clients, rng):
        before = server["global"]
        trained = fed.train(broadcast(before, len(clients)), clients, rng)
        mean = fed.average(trained.received, trained.sizes)
        after = {name: before[name] + SHARE * (mean[name] - before[name]) for name in before}
        return {"global": after}, trained

    return fedavg(fed)._replace(round=round)


ALGORITHMS["careful"] = Method(careful)
summary = fl.simulate(fl.Config(algorithm="careful", clients=10, rounds=10), "runs/careful")
print(f"accuracy {summary['final']['accuracy']:.1%}")
