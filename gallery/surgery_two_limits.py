"""At most 4 M parameters and 300 M operations

A ResNet-18 is pruned to a number of parameters, of multiply-accumulates, or both, where the tighter limit decides.
"""

import matplotlib.pyplot as plt
import timm
import torch
from torch.utils.flop_counter import FlopCounterMode

import surgery

torch.manual_seed(0)
net, image = timm.create_model("resnet18", num_classes=10).eval(), torch.randn(1, 3, 128, 128)
limits = {"parameters": 4_000_000, "macs": 300e6}
targets = {"parameters": {"parameters": 4_000_000}, "operations": {"macs": 300e6}, "both": limits}
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for marker, (name, target) in zip("os^D", {"full": None, **targets}.items()):
    asked = surgery.pruning.Target(**target) if target else None
    small = surgery.pruning.prune(net, target=asked, importance="l2", example=image).model if asked else net
    parameters = sum(p.numel() for p in small.parameters()) / 1e6
    with FlopCounterMode(display=False) as counter:
        small(image)
    macs = counter.get_total_flops() / 2e6
    print(f"{name}: {parameters:.2f} M parameters, {macs:.0f} M operations")
    axis.plot(parameters, macs, marker, fillstyle="none", markersize=14 if name == "both" else 8, label=name)
axis.axvspan(0, 4, ymax=300 / 700, alpha=0.15)
axis.set(title="A ResNet-18, pruned to limits", xlabel="parameters, M", ylabel="operations, M", ylim=(0, 700), xlim=0)
axis.legend(), plt.show()
