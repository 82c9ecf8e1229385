"""Clients with architectures of their own

A convolutional network, a perceptron and a linear model learn from logits on public samples (FedMD), or alone.
"""

import matplotlib.pyplot as plt
from torch import nn

import fl

conv = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))
deep = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
models = {"convolutions": conv, "perceptron": deep, "linear": nn.Sequential(nn.Flatten(), nn.Linear(64, 10))}
few = {"clients": 12, "participants": 12, "samples": 600, "partition": "iid", "local_test": 0.4, "lr": 0.05}
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for side, (name, options) in enumerate({"local": {}, "fedmd": {"fedmd": {"public": 0.3, "epochs": 3}}}.items()):
    fed, algorithm = fl.build(fl.Config.of(algorithm=name, **few, **options), model=list(models.values()))
    server = algorithm.init()
    for number in range(1, 9):
        rng = fl.Rng(0, number)
        server, _ = algorithm.round(server, algorithm.choose(server, rng), rng)
    x, y = fed.data.test_x, fed.data.test_y
    right = [100 * (algorithm.predict(server, x, k).argmax(1) == y).float().mean().item() for k in range(12)]
    means = [sum(right[kind::3]) / 4 for kind in range(3)]
    print(name, [f"{mean:.1f} %" for mean in means])
    axis.bar_label(axis.bar([k + 0.4 * side for k in range(3)], means, 0.4, label=name), fmt="%.0f")
axis.set(title="12 clients of three kinds", ylabel="accuracy, %", ylim=(0, 110))
axis.set_xticks([0.2, 1.2, 2.2], [*models]), axis.legend(loc="upper left", ncols=2)
plt.show()
