"""Repair the batch norms of an averaged model

The batch statistics of an averaged network are wrong. `repair` measures them, which restores the accuracy.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import surgery

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x, nets, part = x.float() / 16, [], lambda size: (nn.Linear(size, 256), nn.BatchNorm1d(256), nn.ReLU())
for seed in (0, 1, 2):
    torch.manual_seed(seed)
    nets.append(nn.Sequential(*part(64), *part(256), *part(256), nn.Linear(256, 10)))
    optimizer = torch.optim.Adam(nets[-1].parameters(), lr=0.001)
    for batch in torch.randint(1400, (80 * (seed < 2), 64)):
        nn.functional.cross_entropy(nets[-1](x[batch]), y[batch]).backward()
        optimizer.step(), optimizer.zero_grad()
path, accuracies = torch.linspace(0, 1, 21).tolist(), {"averaged": [], "averaged, repaired": []}
for share in path:
    mean = surgery.load(nets[2], surgery.average(nets[:2], weights=[1 - share, share])).eval()
    for values, net in zip(accuracies.values(), (mean, surgery.symmetry.repair(mean, batches=[x[:1400]]))):
        values.append(100 * (net(x[1400:]).argmax(1) == y[1400:]).float().mean().item())
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
print({name: f"{min(values):.1f} % at least" for name, values in accuracies.items()})
[axis.plot(path, values, marker="o", label=name) for name, values in accuracies.items()]
axis.set(title="Between two networks", xlabel="share of the second", ylabel="accuracy, %"), axis.legend(), plt.show()
