"""Width and depth are arguments: accuracy against size

Nine sizes of one ResNet train briefly on digits. A model of the zoo is a name, a width and a depth.
"""

import matplotlib.pyplot as plt
import torch
from sklearn.datasets import load_digits

import zoo

x, y = (torch.tensor(part) for part in load_digits(return_X_y=True))
x = x.view(-1, 1, 8, 8).float() / 16
figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
for depth in (1, 2, 3):
    sizes, right = [], []
    for width in (0.125, 0.25, 0.5):
        spec = zoo.Spec("resnet20", width=width, depth=depth, in_channels=1, image_size=8, norm="group")
        net, draw = spec.build(torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
        optimizer = torch.optim.Adam(net.parameters(), lr=0.005)
        for batch in torch.randint(1400, (30, 32), generator=draw):
            torch.nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
        sizes.append(spec.count().parameters / 1000)
        right.append(100 * (net(x[1400:]).argmax(1) == y[1400:]).float().mean().item())
    print(f"depth {depth}: {right[-1]:.1f} % at the largest width")
    axis.plot(sizes, right, marker="o", label=f"depth {depth}, widths 1/8 to 1/2")
axis.set(title="Sizes of a ResNet", xlabel="parameters, thousands", ylabel="test accuracy, %")
axis.legend(), plt.show()
