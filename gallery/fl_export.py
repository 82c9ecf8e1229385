"""Export a model, and use it elsewhere

The weights become a safetensors file, which other libraries read; the model becomes a program for torch alone.
"""

import matplotlib.pyplot as plt
import torch

import fl

config = fl.Config.of(algorithm="fedavg", partition="iid", rounds=8, local_epochs=2, width=0.5)
fl.simulate(config, "runs/trained")
data = config.load()
images, labels = data.test_x, data.test_y
x = data.normalise(images)
fl.export_model("runs/trained", "model.safetensors")
torch.export.save(torch.export.export(fl.load_model("runs/trained"), (x,)), "model.pt2")
confidence, predicted = torch.export.load("model.pt2").module()(x).softmax(1).max(1)
print(f"model.pt2: {(predicted == labels).float().mean():.1%} correct")
figure, axes = plt.subplots(3, 6, figsize=(7, 4.2), layout="constrained")
for axis, k in zip(axes.flat, range(18)):
    axis.imshow(images[k, 0], cmap="gray_r")
    wrong = predicted[k] != labels[k]
    axis.set_title(f"{predicted[k]}{'!' * wrong} ({confidence[k]:.0%})", fontsize=9, color="red" if wrong else "black")
    axis.axis("off")
figure.suptitle("Predictions of the exported model (red and !: wrong)")
plt.show()
