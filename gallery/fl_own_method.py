"""Your own method

A method is a client's and a server's function. This server averages like FedAvg's, and adds momentum.
"""

from dataclasses import replace

import matplotlib.pyplot as plt

import fl
from fl.algorithms import ALGORITHMS
from fl.algorithms.method import Method


def heavy(fed: fl.Federation) -> fl.Algorithm:
    def aggregate(server, clients, update, rng):
        old, mean = server["global"], fed.average(update.received, update.sizes)
        steps = {name: 0.5 * step + mean[name] - old[name] for name, step in server["steps"].items()}
        return {"global": {name: old[name] + step for name, step in steps.items()}, "steps": steps}

    start = {"global": fed.initial(), "steps": {name: 0 * tensor for name, tensor in fed.initial().items()}}
    return replace(ALGORITHMS["fedavg"](fed), init=lambda: start, aggregate=aggregate)


ALGORITHMS["heavy"] = Method(heavy)
for name in ("fedavg", "heavy"):
    rows, config = [], fl.Config.of(algorithm=name, rounds=12, partition="iid", local_epochs=1)
    print(fl.simulate(config, f"runs/own-method-{name}", on_round=rows.append)["final"])
    plt.plot(range(1, 13), [100 * row["accuracy"] for row in rows], marker="o", label=name)
plt.title("FedAvg with momentum"), plt.xlabel("round"), plt.ylabel("test accuracy, %"), plt.legend(), plt.show()
