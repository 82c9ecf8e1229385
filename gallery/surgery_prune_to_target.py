"""Prune a model to a number of operations

`Target` asks for a share of the multiply-accumulates. `prune` scores all widths in each step, and cuts the positions
with the lowest scores, so each width keeps another share.
"""

import matplotlib.pyplot as plt
import torch

import surgery
import zoo

net = zoo.create("resnet20", torch.Generator().manual_seed(0), width=0.5).eval()
image = torch.randn(2, 3, 32, 32)
shares = {width.name: width.size for width in surgery.widths(net, image) if not width.reason}
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for macs in (0.75, 0.5, 0.25):
    small = surgery.pruning.prune(
        net, target=surgery.pruning.Target(macs=macs), importance="l2", steps=3, example=image
    ).model
    left = {width.name: width.size for width in surgery.widths(small, image)}
    parameters = sum(p.numel() for p in small.parameters()) / sum(p.numel() for p in net.parameters())
    print(f"{macs:.0%} of the operations, {parameters:.0%} of the parameters")
    kept = [100 * left.get(name, 1) / size for name, size in shares.items()]
    axis.bar(range(1, len(kept) + 1), kept, label=f"{macs:.0%}")
axis.set(
    title="What each width of a ResNet-20 keeps", xlabel="width, from input to output", ylabel="kept, %", ylim=(0, 105)
)
figure.legend(title="operations left", loc="outside lower center", ncols=3)
plt.show()
