"""Graphs of unequal size

A graph network has three inputs: nodes (padded to the largest graph), their mask, and the edges.
"""

import matplotlib.pyplot as plt
import numpy as np
from torch import nn

import fl


class GraphNet(nn.Sequential):
    def forward(self, x, mask, edges):
        for layer in self[:-1]:
            x = (edges @ layer(x)).relu()
        return self[-1]((x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True))


y, sizes = np.arange(300) % 3, np.random.default_rng(0).integers(4, 13, size=300)
apart = [abs(np.subtract.outer(range(n), range(n))) for n in sizes]
edges = [(np.isin(a, (0, 1, len(a) - 1)), a * a[0] * a[:, :1] == 0, a >= 0)[k] * 1.0 for k, a in zip(y, apart)]
x = {**fl.data.pad([np.ones((n, 1)) for n in sizes]), "edges": fl.data.pad(edges)["x"]}
data = fl.Dataset.from_arrays({k: v[:200] for k, v in x.items()}, y[:200], {k: v[200:] for k, v in x.items()}, y[200:])
net, rows = GraphNet(nn.Linear(1, 16), nn.Linear(16, 16), nn.Linear(16, 3)), []
config = fl.Config.of(algorithm="fedavg", clients=5, partition="iid", rounds=15, optimizer="adam", lr=0.01)
fl.simulate(config, "runs/graphs", dataset=data, model=net, on_round=rows.append)
print(f"{rows[-1]['accuracy']:.1%} of rings, stars and complete graphs are classified correctly")
plt.plot(range(1, 16), [100 * row["accuracy"] for row in rows], "o-")
plt.title("Rings, stars and complete graphs"), plt.xlabel("round"), plt.ylabel("test accuracy, %"), plt.show()
