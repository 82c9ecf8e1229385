"""List the widths of a model

A width runs along axes of many tensors, which can only be cut together. Here are the widths of four models.
"""

import matplotlib.pyplot as plt

import surgery

names = ("torchvision:resnet18", "torchvision:mobilenet_v3_small", "timm:vit_tiny_patch16_224", "timm:convnext_atto")
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for name, marker in zip(names, "osx^"):
    net = surgery.libraries.make_model(name)
    widths = surgery.widths(net, surgery.libraries.example_input(net))
    free = [width for width in widths if not width.reason]
    print(f"{name}: {len(free)} widths may shrink; the longest runs through {max(len(w.members) for w in free)} axes")
    sizes, axes = zip(*((width.size, len(width.members)) for width in free))
    axis.scatter(sizes, axes, marker=marker, alpha=0.6, label=name.partition(":")[2])
axis.set(title="The widths of four models", xlabel="positions", ylabel="axes of tensors that share it")
axis.set(xscale="log", yscale="log")
axis.legend()
plt.show()
