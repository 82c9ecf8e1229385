"""Average models of unequal widths

Three widths of one network train alone. Their plans say where they overlap, so their mean is one full network.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits
from torch import nn

import surgery

torch.manual_seed(0)
x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x, net, accuracy = x.float() / 16, nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)), {}
for _ in range(8):
    clients = [surgery.narrow(net, rate, x[:2]) for rate in (0.25, 0.5, 1.0)]
    for k, (model, _) in enumerate(clients):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in torch.randint(480 * k, 480 * k + 480, (30, 32)):
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step(), optimizer.zero_grad()
    models, plans = zip(*clients)
    surgery.load(net, surgery.average(models, plans, fallback=net))
    for name, model in zip(("width 1/4", "width 1/2", "width 1", "their mean"), [*models, net]):
        accuracy.setdefault(name, []).append(100 * (model(x[1440:]).argmax(1) == y[1440:]).float().mean().item())
for name, values in accuracy.items():
    print(f"{name}: {values[-1]:.1f} %")
    plt.plot(range(1, 9), values, lw=3 if "mean" in name else 1.5, label=name)
plt.title("Unequal models"), plt.xlabel("round"), plt.ylabel("test accuracy, %"), plt.legend(), plt.show()
