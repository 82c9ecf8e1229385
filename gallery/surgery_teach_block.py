"""Teach surgery a block of your own

Once a class of yours is registered as a block, surgery finds, shortens and lengthens its sections, as in a ResNet.
"""

import matplotlib.pyplot as plt
import torch
from torch import nn

import surgery


@surgery.register_block
class Refine(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(x).relu())


torch.manual_seed(0)
net, x = nn.Sequential(nn.Linear(4, 8), *(Refine() for _ in range(6)), nn.Linear(8, 2)), torch.randn(200, 4)
print(surgery.sections(net))
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for keep, marker in zip((6, 5, 3, 1), "os^x"):
    y = surgery.ungraft(net, keep=[keep], example=x[:2])[0](x)
    axis.scatter(*torch.stack([net(x), y])[..., 0].tolist(), 12, marker=marker, label=f"{keep} block{'s' * (keep > 1)}")
axis.set(title="Outputs with fewer blocks", xlabel="output of six blocks", ylabel="output"), axis.legend(), plt.show()
