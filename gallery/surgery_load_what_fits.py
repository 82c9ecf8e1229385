"""Load a checkpoint of other classes and names

A network for five digits initialises one for ten. Its names have a prefix, and its head has half of the classes.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import surgery
import zoo

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x, _ = x.view(-1, 1, 8, 8).float() / 16, plt.figure(figsize=(6, 4), layout="constrained")
for label, classes in {"five digits": 5, "ten, from the beginning": 10, "ten, from five": 10}.items():
    net = zoo.create("cnn", torch.Generator().manual_seed(0), in_channels=1, image_size=8, num_classes=classes)
    if classes == 5:
        five = net
    if label.endswith("five"):
        net, fit = surgery.load(net, torch.nn.DataParallel(five).state_dict(), fit="corner")
        print(fit)
    optimizer, draw, losses = torch.optim.Adam(net.parameters(), 0.003), torch.Generator().manual_seed(0), []
    for _ in range(80):
        batch = (y < classes).nonzero().flatten()[torch.randint(900, (64,), generator=draw)]
        losses.append(torch.nn.functional.cross_entropy(net(x[batch]), y[batch]))
        losses[-1].backward(), optimizer.step(), optimizer.zero_grad()
    plt.plot(torch.stack(losses).detach(), label=label)
plt.title("What fits is loaded"), plt.xlabel("training step"), plt.ylabel("training loss"), plt.legend(), plt.show()
