"""Scale models to one norm

One of four models has weights three times as large. FedFA's scaling brings all to one norm before averaging.
"""

import matplotlib.pyplot as plt
import torch

import surgery
import zoo

nets = [zoo.create("lenet", torch.Generator().manual_seed(seed)) for seed in range(4)]
models = surgery.stack(nets)
models = {name: t * torch.tensor([1, 1, 1, 3.0]).view(4, *[1] * (t.ndim - 1)) for name, t in models.items()}
layers = surgery.layers(nets[0])
scaled, factors = surgery.match_norms(models, groups=surgery.segments(layers))
mean = surgery.average(models), surgery.average(scaled)
print("factors of the first layer:", [round(factor, 2) for factor in factors[layers[0].tensors[0]].tolist()])
figure, axes = plt.subplots(1, 2, figsize=(7, 3.6), layout="constrained", sharey=True)
for axis, title, stack in zip(axes, ("as they are", "matched"), (models, scaled)):
    for k, state in enumerate(surgery.unstack(stack)):
        norms = [torch.cat([state[name].flatten() for name in layer.tensors]).norm() for layer in layers]
        axis.plot([layer.name for layer in layers], norms, marker="o", label=f"model {k}")
    axis.set(title=title, xlabel="layer"), axis.tick_params(axis="x", rotation=45)
axes[0].set_ylabel("norm")
axes[0].legend()
plt.show()
