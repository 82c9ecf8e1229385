"""Cut, widen and deepen a network in mid-training

Adam's moments follow each operation's plan, so training continues; a new Adam would start again each time.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import surgery
import zoo

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x, axes = x.view(-1, 1, 8, 8).float() / 16, plt.figure(figsize=(6, 4), layout="constrained").gca()
ways = {30: (surgery.narrow, {"width": 0.5}), 60: (surgery.widening.widen, {"rate": 2})}
ways[90] = surgery.graft, {"depths": [3, 3, 3], "mode": "identity"}
for label, line in (("moments follow", "-"), ("a new optimizer", ":")):
    draw = torch.Generator().manual_seed(0)
    net = zoo.create("resnet20", draw, width=0.5, depth=2, in_channels=1, image_size=8, norm="group")
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=0.002), []
    for step in range(120):
        if step in ways:
            other, plan = ways[step][0](net, example=x[:2], **ways[step][1])
            followed, net = surgery.optimizers.follow(optimizer, net, other, plan), other
            optimizer = followed if "follow" in label else torch.optim.Adam(net.parameters(), lr=0.002)
        batch = torch.randint(len(x), (64,), generator=draw)
        losses.append(torch.nn.functional.cross_entropy(net(x[batch]), y[batch]))
        losses[-1].backward(), optimizer.step(), optimizer.zero_grad()
    axes.plot(torch.stack(losses).detach(), line, label=label), print(f"{label}: loss {losses[-1]:.3f} at the end")
axes.set(title="Narrow at 30, wider at 60, deeper at 90", xlabel="step", ylabel="loss"), plt.legend(), plt.show()
