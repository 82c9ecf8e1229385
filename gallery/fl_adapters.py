"""Adapters of low rank, and how servers average them

A network that knows digits lying on their side learns upright ones. Clients train matrices of rank 4 beside its layers.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import fl

x, y = (torch.tensor(array) for array in load_digits(return_X_y=True))
x = x.float().view(-1, 1, 8, 8).rot90(dims=(2, 3)) / 8 - 1
torch.manual_seed(0)
base = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(base.parameters(), 3e-3)
for batch in torch.randint(1400, (400, 64), generator=torch.Generator().manual_seed(0)):
    nn.functional.cross_entropy(base(x[batch]), y[batch]).backward()
    optimizer.step(), optimizer.zero_grad()
ways = {"FedIT": ("fedavg", "both"), "FFA-LoRA": ("fedavg", "b"), "FlexLoRA": ("flexlora", "both")}
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for label, (method, learn) in ways.items():
    config = fl.Config.of(algorithm=method, rounds=15, lr=0.01, adapters={"kind": "lora", "rank": 4, "learn": learn})
    rows: list = []
    fl.simulate(config, f"runs/adapters-{label}", model=base, on_round=rows.append)
    print(f"{label}: {rows[-1]['accuracy']:.1%} right, {rows[-1]['bytes_up'] / 1000:.1f} kB a round from each client")
    axis.plot([row["round"] for row in rows], [100 * row["accuracy"] for row in rows], label=label)
axis.set(title="Adapters of rank 4", xlabel="round", ylabel="test accuracy, %"), axis.legend(), plt.show()
