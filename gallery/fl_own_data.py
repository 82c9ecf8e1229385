"""Your own data

Arrays become a data set, a module becomes the model. No client has the whole picture; together they learn it.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import fl

rng = np.random.default_rng(0)
y = np.arange(1200) % 3
turn = rng.uniform(0, 3, size=1200)
angle = turn + y * 2 * np.pi / 3
x = np.stack([turn * np.cos(angle), turn * np.sin(angle)], axis=1) + rng.normal(scale=0.08, size=(1200, 2))
data = fl.Dataset.from_arrays(x[:900], y[:900], x[900:], y[900:])
print(data)
net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3))
config = fl.Config.of(algorithm="fedavg", clients=10, rounds=15, lr=0.1)
summary = fl.simulate(config, "runs/spirals", dataset=data, model=net)
net = fl.load_model("runs/spirals", model=net)
figure, axis = plt.subplots(figsize=(6, 4.5), layout="constrained")
line = torch.linspace(-3.5, 3.5, 200)
predicted = net(torch.cartesian_prod(line, line)).argmax(1).view(200, 200)
axis.pcolormesh(line, line, predicted.T, cmap="Set2", alpha=0.4)
axis.scatter(*x[900:].T, c=y[900:], cmap="Set2", s=12, edgecolors="0.3", linewidths=0.4)
axis.set(title=f"Three spirals, {summary['final']['accuracy']:.1%} right", xlabel="feature 1", ylabel="feature 2")
plt.show()
