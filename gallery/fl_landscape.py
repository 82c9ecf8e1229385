"""The loss landscape around a trained model

A command measures the loss around the models of runs in two random directions, here after 2 and after 6 rounds.
"""

import subprocess
import sys

import matplotlib.pyplot as plt

import fl

for rounds in (2, 6):
    config = fl.Config.of(algorithm="fedavg", partition="iid", rounds=rounds, local_epochs=2, width=0.25)
    fl.simulate(config, f"runs/landscape{rounds}")
landscape = ["fl.landscape", "runs/landscape2", "runs/landscape6", "--points", "9", "--samples", "100"]
print(subprocess.run([sys.executable, "-m", *landscape], check=True, capture_output=True, text=True).stdout)
picture = plt.imread("landscape.png")
plt.figure(figsize=(8, 8 * len(picture) / len(picture[0])))
plt.axes((0, 0, 1, 1)).imshow(picture)
plt.axis("off")
plt.show()
