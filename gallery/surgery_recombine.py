"""Recombine the layers of several models

FedMR's step: each block of each model moves to one of the models. A colour is the model that a block comes from.
"""

import matplotlib.pyplot as plt
import torch

import surgery
import zoo

net, draw = zoo.create("resnet20", width=0.25), torch.Generator().manual_seed(8)
blocks = surgery.layers(net, unit="block")
models = surgery.stack([{name: torch.full(t.shape, k) for name, t in surgery.state(net).items()} for k in range(5)])
figure, axes = plt.subplots(1, 3, figsize=(7, 4), layout="constrained", sharey=True)
for axis, fraction in zip(axes, (1, 0, 1 / 3)):
    pieces = surgery.segments(blocks, fraction=fraction)
    swaps = surgery.permutations(len(pieces), k=5, generator=draw)
    mixed = models if fraction == 1 else surgery.shuffle(models, segments=pieces, permutations=swaps)
    owner = [mixed[block.tensors[0]].flatten(1)[:, 0].tolist() for block in blocks]
    axis.pcolormesh(range(1, 6), range(len(blocks)), owner, cmap="viridis", shading="nearest", edgecolors="white", lw=2)
    axis.set(title={1: "before", 0: "block by block"}.get(fraction, "in thirds"), xlabel="model")
axes[0].set_yticks(range(len(blocks)), [block.name for block in blocks])
axes[0].invert_yaxis()
back = surgery.shuffle(mixed, segments=pieces, permutations=surgery.recombine.inverse(swaps))
print("shuffled back, all is as before:", all(torch.equal(back[name], models[name]) for name in models))
print("models that run:", len(surgery.unstack(mixed)))
plt.show()
