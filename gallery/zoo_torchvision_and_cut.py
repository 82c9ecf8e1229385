"""Load torchvision's weights, and cut

The zoo's ResNet-18 loads torchvision's weights and returns the same logits. A narrower one is cut out of it.
"""

import matplotlib.pyplot as plt
import torch
import torchvision

import surgery
import zoo

torch.manual_seed(0)
theirs = torchvision.models.resnet18().eval()  # weights="DEFAULT" for trained ones
net, image = zoo.load(zoo.create("resnet18"), theirs.state_dict()).eval(), torch.randn(2, 3, 64, 64)
print(f"the logits differ by {(net(image) - theirs(image)).abs().max():.1g}")
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for depth in (2, 1):
    shallow, _ = surgery.ungraft(net, keep=[depth] * 4)
    points = []
    for width in (1, 0.75, 0.5, 0.25):
        small = zoo.Spec("resnet18", width=width, depth=depth)
        cut, plan = surgery.narrow(shallow, like=small.build())
        assert cut.eval()(image).shape == (2, 1000)
        points.append((small.count().parameters / 1e6, small.count().macs / 1e9))
    axis.plot(*zip(*points), marker="o", label=f"{depth} block{'s' * (depth > 1)} a section, widths 1/4 to 1")
axis.set(title="Cut out of a ResNet-18", xlabel="parameters, millions", ylabel="MACs, billions")
axis.legend()
plt.show()
