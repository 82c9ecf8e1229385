"""Drop or merge experts of a mixture

Experts are scored by how often the router chooses them. Half of them are dropped, or merged into the others.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import surgery


class Mixture(nn.ModuleDict):
    def forward(self, x):
        best, chosen = self.router(x).topk(2)
        return (best.softmax(1) * torch.cat([expert(x) for expert in self.experts], 1).gather(1, chosen)).sum(1)


torch.manual_seed(0)
experts = nn.ModuleList(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(8))
net, x = Mixture({"router": nn.Linear(1, 8), "experts": experts}), torch.linspace(-3, 3, 400)[:, None]
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
for _ in range(1000):
    optimizer.zero_grad(), (net(x) - (3 * x[:, 0]).sin()).square().mean().backward(), optimizer.step()
few = surgery.experts.keep(net, 4, scores=(shares := surgery.experts.frequency(net, [x])))[0]
for label, one in {"8": net, "4 kept": few, "8 merged to 4": surgery.experts.merge(net, 4, scores=shares)[0]}.items():
    plt.plot(x[:, 0], one(x).detach(), label=label)
    print(f"{label} experts: loss {(one(x) - (3 * x[:, 0]).sin()).square().mean().item():.3f}")
plt.ylim(-1.5, 2.3), plt.legend(title="experts", ncols=3), plt.title("A curve, with fewer experts"), plt.xlabel("x")
plt.show()
