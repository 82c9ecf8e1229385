"""Prune a model to a number of operations

`Target` asks for a share of the multiply-accumulates. With scores the widths compete, and each keeps another share.
"""

import matplotlib.pyplot as plt
import torch

import surgery
import zoo

net = zoo.create("resnet20", torch.Generator().manual_seed(0), width=0.5).eval()
image = torch.randn(2, 3, 32, 32)
scores = surgery.importance(net, example=image, by="l2")
shares = {width.name: width.size for width in surgery.widths(net, example=image) if width.name in scores}
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for macs in (0.75, 0.5, 0.25):
    small, plan = surgery.narrow(net, target=surgery.Target(macs=macs), example=image, keep_top=scores)
    left = {width.name: width.size for width in surgery.widths(small, example=image)}
    parameters = sum(p.numel() for p in small.parameters()) / sum(p.numel() for p in net.parameters())
    print(f"{macs:.0%} of the operations, {parameters:.0%} of the parameters")
    kept = [100 * left[name] / size for name, size in shares.items()]
    axis.plot(range(1, len(kept) + 1), kept, "o-", label=f"{macs:.0%} of the operations")
axis.set(
    title="What each width of a ResNet-20 keeps", xlabel="width, from input to output", ylabel="kept, %", ylim=(0, 105)
)
axis.legend()
plt.show()
