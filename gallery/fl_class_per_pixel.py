"""Segment shapes with a small U-Net

Clients learn the class of each pixel from noisy squares and discs. The figure shows images, masks and predictions.
"""

import matplotlib.pyplot as plt
import numpy as np
from torch import cat, nn, stack

import fl


class Skip(nn.Sequential):
    def forward(self, x):
        return cat([x, super().forward(x)], 1)


rng, (row, column) = np.random.default_rng(0), np.mgrid[:16, :16]
a, b, c, d = rng.integers(3, 13, size=(4, 360, 1, 1))
y = np.where(np.hypot(row - a, column - b) < 4, 2, np.maximum(abs(row - c), abs(column - d)) < 3)
x = ((y > 0) + rng.normal(scale=0.3, size=y.shape))[:, None]
data = fl.Dataset.from_arrays(x[:300], y[:300], x[300:], y[300:], task="segmentation")
deep = Skip(nn.MaxPool2d(2), nn.Conv2d(12, 24, 5, padding=2), nn.ReLU(), nn.Upsample(scale_factor=2))
net = nn.Sequential(nn.Conv2d(1, 12, 5, padding=2), nn.ReLU(), deep, nn.Conv2d(36, 3, 5, padding=2))
config = fl.Config.of(algorithm="fedavg", partition="iid", clients=6, rounds=12, loss="dice_cross_entropy", flip=True)
final = fl.simulate(config, "runs/pixels", dataset=data, model=net)["final"]
print(f"mean IoU {final['mean_iou']:.1%}, mean Dice {final['dice']:.1%}")
predicted = fl.load_model("runs/pixels", model=net)(data.test_x[:6]).argmax(1)
plt.imshow(stack([data.test_x[:6, 0], data.test_y[:6], predicted]).transpose(1, 2).reshape(48, 96))
plt.yticks([8, 24, 40], ["image", "mask", "predicted"]), plt.xticks([]), plt.title("Six test images"), plt.show()
