"""FedRolex: rolling windows

`narrow(net, like=small)` cuts the first channels out of a model; `rolling` moves that window on, so that in time all of
it is trained.
"""

import matplotlib.pyplot as plt
import torch

import surgery
import zoo

net, small = (zoo.create("cnn", width=width, in_channels=1, image_size=8) for width in (0.5, 0.2))
leading, plan = surgery.narrow(net, like=small)
print(
    "the same plan:",
    surgery.width.corner.rolling(net, small, example=torch.zeros(1, 1, 8, 8))(0).entries == plan.entries,
)
window = surgery.width.corner.rolling(net, small, example=torch.zeros(1, 1, 8, 8))
name = next(n for n, tensor in surgery.state(net).items() if tensor.ndim == 4 and tensor.shape[1] > 1)
figure, axes = plt.subplots(1, 3, figsize=(7, 3), layout="constrained", sharey=True)
for axis, by in zip(axes, (0, 8, 26)):
    _, mask = window(by).embed(surgery.state(small))
    axis.imshow(mask[name][:, :, 0, 0], cmap="Blues", vmin=-0.3, vmax=1)
    axis.set(title=f"moved by {by}", xlabel="input channel")
axes[0].set_ylabel("output channel")
figure.suptitle(f"The part of {name} that the small model holds")
plt.show()
