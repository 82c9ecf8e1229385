"""FedMR against FedAvg on digits

FedMR shuffles the layers of its clients' models instead of averaging them, so it takes more rounds to learn.
"""

import subprocess
import sys

import matplotlib.pyplot as plt

settings = {"algorithm": "fedavg,fedmr", "clients": "10", "rounds": "10", "local-epochs": "2", "width": "0.25"}
flags = [f"--{name}={value}" for name, value in settings.items()]
run = [sys.executable, "-m", "fl.run", *flags, "--name", "pair"]
print(subprocess.run(run, check=True, capture_output=True, text=True).stdout)
picture = plt.imread("runs/pair/comparison.png")
plt.figure(figsize=(8, 8 * len(picture) / len(picture[0])))
plt.axes((0, 0, 1, 1)).imshow(picture)
plt.axis("off")
plt.show()
