"""Clients with architectures of their own

Convolutions, a perceptron and a linear model learn together by their logits of public samples (FedMD), or each alone.
"""

import matplotlib.pyplot as plt
import numpy as np
from torch import nn

import fl

conv = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))
deep = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
models = {"convolutions": conv, "perceptron": deep, "linear": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))}
few = {
    "clients": 12,
    "participants": 12,
    "samples": 600,
    "partition": "iid",
    "local_test": 0.4,
    "rounds": 8,
    "lr": 0.05,
}
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for k, name in enumerate(("local", "fedmd")):
    config = fl.Config.of(algorithm=name, **few, **({"fedmd": {"public": 0.3, "epochs": 3}} if k else {}))
    fed, algorithm = fl.build(config, model=list(models.values()))
    server = algorithm.init()
    for number in range(1, config.rounds + 1):
        rng = fl.Rng(config.seed, number)
        server, _ = algorithm.round(server, algorithm.choose(server, rng), rng)
    right = [(algorithm.predict(server, fed.data.test_x, c).argmax(1) == fed.data.test_y).float() for c in range(12)]
    means = [100 * np.mean([one.mean() for one in right[kind::3]]) for kind in range(3)]
    print(name, [f"{mean:.1f} %" for mean in means])
    axis.bar(np.arange(3) + 0.4 * k, means, 0.38, label={"local": "each alone", "fedmd": "FedMD"}[name])
axis.set(title="12 clients of three kinds", ylabel="accuracy, %", xticks=np.arange(3) + 0.2, xticklabels=[*models])
axis.legend()
plt.show()
