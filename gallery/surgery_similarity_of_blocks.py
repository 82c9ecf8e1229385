"""Measure distances between copied blocks

`graft` deepens a network with copies of its blocks. The figure shows how far the copies move apart in training.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import surgery
import zoo

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x, draw = x.view(-1, 1, 8, 8).float() / 16, torch.Generator().manual_seed(0)
net = zoo.create("resnet20", draw, width=0.25, depth=2, in_channels=1, image_size=8)
net, _ = surgery.graft(net, depths=[4, 4, 4], example=x[:2])
optimizer, distances = torch.optim.Adam(net.parameters(), lr=0.003), {}
for step in range(51):
    for section in surgery.sections(net) if step % 5 == 0 else ():
        copies = [dict(net.get_submodule(block).named_parameters()) for block in section.blocks[1:]]
        distances.setdefault(section.name, []).append(surgery.distance(copies, copies).mean().item())
    batch = torch.randint(len(x), (32,), generator=draw)
    torch.nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
    optimizer.step()
    optimizer.zero_grad()
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for name, values in distances.items():
    print(f"{name}: {values[0]:.2f} at first, {values[-1]:.2f} in the end")
    axis.plot(range(0, 51, 5), values, marker="o", label=name)
axis.set(title="Copies of blocks move apart", xlabel="training step", ylabel="distance"), axis.legend(), plt.show()
