"""Partitions compared

Four partitions of the digits among 20 clients. A row is a client, a column a class; dark means many samples.
"""

import matplotlib.pyplot as plt
import torch

import fl

ways = {"iid": {}, "dirichlet": {"alpha": 0.1}, "shards": {}, "clusters": {"clusters": (4,)}}
figure, axes = plt.subplots(1, 4, figsize=(8, 4), layout="constrained", sharey=True)
for axis, (name, settings) in zip(axes, ways.items()):
    fed, _ = fl.build(fl.Config.of(algorithm="fedavg", partition=name, clients=20, **settings))
    table = torch.stack([torch.bincount(fed.data.y[part], minlength=10) for part in fed.clients.train])
    print(f"{name}: {table.sum(1).min()} to {table.sum(1).max()} samples a client")
    axis.imshow(table.sqrt(), cmap="Blues", aspect="auto")
    axis.set(title=name, xlabel="class", xticks=range(0, 10, 3))
axes[0].set(ylabel="client", yticks=range(0, 20, 5))
plt.show()
