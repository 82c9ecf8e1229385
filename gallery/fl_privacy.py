"""Train with differential privacy

Noise on the sum of clipped updates hides what any one client has, at a price in accuracy.
"""

import matplotlib.pyplot as plt
from torch import nn

import fl

clients = {"clients": 100, "participants": 100, "partition": "iid", "min_samples": 5, "lr": 0.1, "momentum": 0.0}
config = fl.Config(algorithm=("fedavg",), rounds=10, **clients)
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for noise in (None, 1.0, 4.0):
    privacy = fl.Privacy() if noise is None else fl.Privacy(clip=1.0, noise=noise)
    private = fl.Config(**{**vars(config), "privacy": privacy})
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    fl.simulate_all(private, f"runs/noise {noise}", model=net)
    found: fl.Results = fl.results(f"runs/noise {noise}")
    for run in found.runs:
        label = f"noise {noise:g}: epsilon {run.rows[-1]['epsilon']:.0f}" if noise else "not private"
        axis.plot([row["round"] for row in run.rows], [100 * row["accuracy"] for row in run.rows], label=label)
axis.set(title="Differential privacy and accuracy", xlabel="round", ylabel="test accuracy, %")
axis.legend()
plt.show()
