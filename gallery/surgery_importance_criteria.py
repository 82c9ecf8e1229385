"""Which positions to keep: criteria compared

A trained network is cut by four scores and by none, without fine-tuning. A good score keeps accuracy for longer.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import surgery

torch.manual_seed(0)
x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x, loss = x.float() / 16, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1])
net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
for batch in torch.randint(1400, (300, 64)):
    loss(net, (x[batch], y[batch])).backward()
    optimizer.step(), optimizer.zero_grad()
batches = {"batches": [(x[:1400], y[:1400])], "loss": loss}
needs = {"first": {}, "l1": {}, "l2": {}, "activation": {"batches": [x[:1400]]}, "taylor": batches}
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for by, inputs in needs.items():
    scores = None if by == "first" else surgery.pruning.importance(net, example=x[:1], by=by, **inputs)
    small = {r: surgery.narrow(net, r / 100, x[:1], scores=scores)[0] for r in range(10, 101, 10)}
    right = [100 * (model(x[1400:]).argmax(1) == y[1400:]).float().mean().item() for model in small.values()]
    print(f"{by:10} {right[4]:.1f} % at half the width")
    axis.plot(list(small), right, marker="o", label="first positions" if by == "first" else by)
axis.set(title="Cut, not fine-tuned", xlabel="width left, %", ylabel="test accuracy, %"), axis.legend(), plt.show()
