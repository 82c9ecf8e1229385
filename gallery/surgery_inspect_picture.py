"""A picture of a cut model

`python -m surgery inspect` draws what a cut would leave. A bar is a layer; lines join layers that shrink together.
"""

import subprocess
import sys

import matplotlib.pyplot as plt

inspect = [sys.executable, "-m", "surgery", "inspect", "timm:resnet18", "--width", "0.5", "--depth", "1,2,2,1"]
done = subprocess.run([*inspect, "--plot", "resnet18.png"], check=True, capture_output=True, text=True)
print(*done.stdout.splitlines()[:12], sep="\n")
picture = plt.imread("resnet18.png")
plt.figure(figsize=(8, 8 * len(picture) / len(picture[0])))
plt.axes((0, 0, 1, 1)).imshow(picture)
plt.axis("off")
plt.show()
