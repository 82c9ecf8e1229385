"""Best positions first: one network for every width

`permute` by scores reorders the widths of a trained network, with the best positions first; its outputs stay the same.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import surgery

torch.manual_seed(0)
x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x, net = x.float() / 16, nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
for batch in torch.randint(1400, (200, 64)):
    nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
    optimizer.step(), optimizer.zero_grad()
scores = surgery.pruning.importance(net, example=x[:2], by="l2")
best_first, _ = surgery.symmetry.permute(net, by=scores, example=x[:2])
(width,) = (axis.name for axis in surgery.widths(net, x[:2]) if not axis.reason)
mixed, _ = surgery.symmetry.permute(best_first, {width: torch.randperm(128)}, example=x[:2])
print(f"largest change of an output: {(mixed(x) - net(x)).abs().max():.1g}")
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for label, model in {"best first": best_first, "as trained": net, "at random": mixed}.items():
    small = [surgery.narrow(model, rate / 100, x[:2])[0] for rate in range(5, 101, 5)]
    right = [100 * (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item() for model in small]
    axis.plot(range(5, 101, 5), right, marker="o", label=label)
axis.set(title="The first positions alone", xlabel="width, %", ylabel="test accuracy, %"), axis.legend(), plt.show()
