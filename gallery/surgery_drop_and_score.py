"""Drop given channels, score blocks

`drop` removes channels that you name; `score_blocks` says how much each block changes its input.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import surgery
import zoo

x, y = torch.tensor(load_digits().images[:, None] / 8 - 1).float(), torch.tensor(load_digits().target)
net = zoo.create("resnet20", torch.Generator().manual_seed(0), width=0.5, in_channels=1, num_classes=10)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
for rows in [*torch.arange(1408).split(64)] * 6:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
    optimizer.step()
layers = [f"{block}.conv1" for section in surgery.sections(net) for block in section.blocks]
least = {name: net.get_submodule(name).weight.flatten(1).norm(dim=1).argsort() for name in layers}
figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.6), layout="constrained")
for share in (0.125, 0.25, 0.375, 0.5, 0.625):
    small, _ = surgery.pruning.drop(net, {n: k[: int(share * len(k))] for n, k in least.items()}, example=x[:2])
    left.bar(f"{100 * share:.0f}", 100 * (small.eval()(x[1408:]).argmax(1) == y[1408:]).float().mean(), color="C0")
left.set(title="Channels dropped", xlabel="dropped, % (least weights)", ylabel="test accuracy, %")
print(scores := torch.cat([*surgery.pruning.score_blocks(net, [x[:256]]).values()]))
right.bar(range(1, len(scores) + 1), scores.nan_to_num(posinf=0))
right.set(title="Influence of blocks", xlabel="block; no bar: changes the shape, stays", xticks=range(1, 10, 2))
plt.show()
