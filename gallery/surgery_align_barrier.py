"""Align two models, and look at the barrier between them

On the line between two trained networks the loss rises. `align` puts both into one order, and it rises less.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import surgery

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x, nets = x.float() / 16, []
for seed in (0, 1):
    torch.manual_seed(seed)
    nets.append(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
    optimizer = torch.optim.Adam(nets[-1].parameters(), lr=0.001)
    for batch in torch.randint(1400, (200, 64)):
        nn.functional.cross_entropy(nets[-1](x[batch]), y[batch]).backward()
        optimizer.step(), optimizer.zero_grad()
aligned = surgery.symmetry.align(nets, example=x[:2]).models
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
path = torch.linspace(0, 1, 21).tolist()
for label, ends in {"as trained": nets, "aligned": aligned}.items():
    calls = [torch.func.functional_call(nets[0], surgery.average(ends, weights=[1 - t, t]), (x[1400:],)) for t in path]
    losses = [nn.functional.cross_entropy(logits, y[1400:]).item() for logits in calls]
    axis.plot(path, losses, marker="o", label=label)
    print(f"{label}: {losses[0]:.2f} and {losses[-1]:.2f} at the ends, {max(losses):.2f} at most")
axis.set(title="Loss between two networks", xlabel="share of the second", ylabel="test loss"), axis.legend(), plt.show()
