"""Grow a network while it trains

A small network becomes wider, then deeper, with almost the same outputs, so it keeps what it has learnt.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import surgery
import zoo

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x, draw = x.view(-1, 1, 8, 8).float() / 16, torch.Generator().manual_seed(0)
net, losses = zoo.create("resnet20", draw, width=0.25, depth=2, in_channels=1, image_size=8, norm="group"), []
for step in range(90):
    before = net
    if step == 30:
        net, _ = surgery.widening.widen(before, rate=2, example=x[:2], noise=0.01)
    if step == 60:
        net, _ = surgery.graft(before, depths=[3, 3, 3], mode="identity", example=x[:2])
    if step in (0, 30, 60):
        print(f"step {step}: the outputs change by at most {(net(x[:99]) - before(x[:99])).abs().max():.2g}")
        optimizer = torch.optim.Adam(net.parameters(), lr=0.002)
    batch = torch.randint(len(x), (64,), generator=draw)
    losses.append(torch.nn.functional.cross_entropy(net(x[batch]), y[batch]))
    losses[-1].backward(), optimizer.step(), optimizer.zero_grad()
plt.figure(figsize=(6, 4), layout="constrained").gca().plot(torch.stack(losses).detach())
plt.axvline(30, color="C1", ls="--", label="wider"), plt.axvline(60, color="C2", ls=":", label="deeper")
plt.title("A network grows"), plt.xlabel("training step"), plt.ylabel("training loss"), plt.legend(), plt.show()
