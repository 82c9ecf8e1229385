"""Export a model, and use it elsewhere

The trained model becomes one file that torch runs without this library, pixels in, logits out.
"""

import matplotlib.pyplot as plt
import torch

import fl

config = fl.Config(algorithm="fedavg", partition="iid", rounds=8, local_epochs=2, width=0.5)
fl.simulate(config, "runs/trained")
path = fl.export("runs/trained", "model.pt2", pixels=True)
program = torch.export.load(path).module()
images, labels = config.load().test_x, config.load().test_y
sure, found = program(images).softmax(1).max(1)
print(f"{path}: {(found == labels).float().mean():.1%} right")
figure, axes = plt.subplots(3, 6, figsize=(7, 4.2), layout="constrained")
for axis, k in zip(axes.flat, range(18)):
    axis.imshow(images[k, 0], cmap="gray_r")
    axis.set_title(f"{found[k]} ({sure[k]:.0%})", fontsize=9, color="black" if found[k] == labels[k] else "red")
    axis.axis("off")
figure.suptitle("What the exported model sees (red: wrong)")
plt.show()
