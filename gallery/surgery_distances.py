"""Distances between models

Six networks learn from two initial states. Angles and distances show which networks began at the same state.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import surgery

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x, nets = x.float() / 16, []
for k in range(6):
    torch.manual_seed(k // 3)
    nets.append(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.SGD(nets[-1].parameters(), lr=0.1, momentum=0.9)
    for batch in torch.randint(len(x), (100, 64), generator=torch.Generator().manual_seed(k)):
        nn.functional.cross_entropy(nets[-1](x[batch]), y[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
models = surgery.stack(nets)
figure, axes = plt.subplots(1, 2, figsize=(7, 3.4), layout="constrained")
for axis, title, table in zip(axes, ("cosine", "distance"), (surgery.cosine(models), surgery.distance(models, models))):
    figure.colorbar(axis.imshow(table), ax=axis, shrink=0.8)
    axis.set(title=title, xlabel="model", ylabel="model")
print(surgery.cosine(models)[0])
plt.show()
